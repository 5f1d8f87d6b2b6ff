"""Gemma 3n (text): several residual streams, per-layer embeddings, a low-rank path around attention, MLPs that activate
only their largest gates, and last layers that read the keys and values of earlier layers."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models import gemma3
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, attention_by_kind, decoder_config, layer_types, rms
from llmjax.models.layers.altup import AltUp, LowRank
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.mlp import GatedMLP
from llmjax.models.layers.norm import RMS
from llmjax.models.layers.per_layer import PerLayer
from llmjax.models.layers.residual import Sandwich
from llmjax.models.names import Names

SLIDING, FULL = "sliding_attention", "full_attention"
# What Hugging Face's Gemma3nTextConfig means by a missing key.
DEFAULTS = {
    **{
        key: value
        for key, value in gemma3.DEFAULTS.items()
        if key not in ("sliding_window_pattern", "query_pre_attn_scalar")
    },
    "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144,
    "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
    "activation_sparsity_pattern": None,
}
PERIOD = 5  # of layers without windows, where no key says which they are
SPARSE, SPARSITY = 10, 0.95  # without the key: in how many layers of deeper models which part of the gates is 0
LAYER = "model.layers.*"
PER_LAYER_MODULES = {
    "model.embed_tokens_per_layer": "model.per_layer.embed_tokens",
    "model.per_layer_model_projection": "model.per_layer.projection",
    "model.per_layer_projection_norm": "model.per_layer.norm",
    f"{LAYER}.per_layer_input_gate": f"{LAYER}.per_layer.gate",
    f"{LAYER}.per_layer_projection": f"{LAYER}.per_layer.projection",
    f"{LAYER}.post_per_layer_input_norm": f"{LAYER}.per_layer.norm",
}
NAMES = Names(
    modules={
        **PER_LAYER_MODULES,
        "model.altup_projections.*": "model.altup.projections.*",
        "model.altup_unembed_projections.*": "model.altup.unembed_projections.*",
    }
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("attn_logit_softcapping")
    fields.require("mlp_bias", False)
    fields.require("use_bidirectional_attention", False)
    count = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    kinds = list(layer_types(fields, [SLIDING if (i + 1) % PERIOD else FULL for i in range(count)]))
    norm = rms(fields)
    attention = attention_by_kind(
        fields,
        kinds,
        window=fields.optional_integer("sliding_window"),
        ropes=gemma3.local_ropes(fields, kinds),
        scale=1.0,
        qk_norm=norm,
        v_norm=RMS(norm.eps, weighted=False),
        bias="attention_bias",
    )
    per_layer, altup = embeddings_of_layers(fields, norm), _altup(fields, norm)
    if per_layer is None:
        raise fields.error("hidden_size_per_layer_input", "must be at least 1")
    low_rank = LowRank(rank=fields.integer("laurel_rank"), norm=norm)
    layers = [
        LayerSpec(
            mixer=replace(attention[kind], reads_only=source is not None),
            feed_forward=mlp,
            norm=norm,
            residual=Sandwich(),
            state_of=source,
            per_layer=per_layer,
            altup=altup,
            low_rank=low_rank,
        )
        for kind, source, mlp in zip(kinds, key_sources(fields, kinds), _mlps(fields, count), strict=True)
    ]
    return decoder_config(
        fields,
        layers=layers,
        norm=norm,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        final_softcap=fields.optional_number("final_logit_softcapping"),
        per_layer=per_layer,
    )


def _altup(fields: Fields, norm: RMS) -> AltUp:
    streams, active = fields.integer("altup_num_inputs", maximum=64), fields.integer("altup_active_idx", minimum=0)
    if active >= streams:
        raise fields.error("altup_active_idx", f"is not below altup_num_inputs = {streams}")
    return AltUp(
        streams=streams,
        active=active,
        norm=norm,
        scaled=fields.flag("altup_correct_scale"),
    )


def _mlps(fields: Fields, count: int) -> list[GatedMLP]:
    """The MLP of each layer; config.json gives sizes and sparsity for all layers at once or in lists."""
    sizes = fields.get("intermediate_size")
    inner = fields.indices("intermediate_size") if isinstance(sizes, list | tuple) else ()
    inner = inner or (fields.integer("intermediate_size"),) * count
    if len(inner) != count or 0 in inner:
        raise fields.error("intermediate_size", f"must be a size, or one for each of num_hidden_layers = {count}")
    sparsity = fields.get("activation_sparsity_pattern")
    if sparsity is None:
        sparse = SPARSE if count > SPARSE else 0
        sparsity = [SPARSITY] * sparse + [0.0] * (count - sparse)
    known = isinstance(sparsity, list | tuple) and len(sparsity) == count
    if not known or not all(type(part) in (int, float) and 0 <= part < 1 for part in sparsity):
        problem = f"must be a number from 0 to below 1 for each of num_hidden_layers = {count}"
        raise fields.error("activation_sparsity_pattern", problem)
    activation = fields.choice("hidden_activation", ACTIVATIONS)
    cutoffs = [NormalDist().inv_cdf(part) if part else None for part in sparsity]
    return [
        GatedMLP(inner=size, activation=activation, cutoff=cutoff) for size, cutoff in zip(inner, cutoffs, strict=True)
    ]


def key_sources(fields: Fields, kinds: list[str]) -> list[int | None]:
    """For each layer the layer whose keys and values it reads: the last of its kind that has its own; None: its own."""
    shared = fields.integer("num_kv_shared_layers", minimum=0)
    first = len(kinds) - shared
    if shared and not set(kinds) <= set(kinds[: max(first, 0)]):
        raise fields.error("num_kv_shared_layers", f"leaves no layer of a kind with keys of its own, of {len(kinds)}")
    last = {kind: i for i, kind in enumerate(kinds[:first])}
    return [None if i < first else last[kind] for i, kind in enumerate(kinds)]


def embeddings_of_layers(fields: Fields, norm: RMS) -> PerLayer | None:
    """Embeddings for each layer, from Gemma's keys; None: there are none."""
    if not (size := fields.integer("hidden_size_per_layer_input", minimum=0)):
        return None
    return PerLayer(
        size=size,
        vocab_size=fields.integer("vocab_size_per_layer_input"),
        activation=fields.choice("hidden_activation", ACTIVATIONS),
        norm=norm,
        unknown=0 if fields.get("pad_token_id") is None else fields.integer("pad_token_id", minimum=0),
    )


FAMILIES = (
    Family(from_hf, DEFAULTS, architectures=("Gemma3nForCausalLM",), model_types=("gemma3n_text",), names=NAMES),
)
