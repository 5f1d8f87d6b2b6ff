"""Nemotron-H: blocks of one half each, state spaces of Mamba 2, attention without positions, and MLPs.

A block that mixes tokens and the MLP behind it, if there is one, make a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmjax.models import llama, mamba2
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, attention_by_kind, decoder_config, mlp
from llmjax.models.layers.layer import LayerSpec, Mixer
from llmjax.models.layers.norm import RMS
from llmjax.models.layers.residual import MixerAlone, PreNorm
from llmjax.models.names import Names

# What Hugging Face's NemotronHConfig means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    **mamba2.MAMBA_DEFAULTS,
    "vocab_size": 131072,
    "intermediate_size": 21504,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 8,
    "time_step_min": 0.001,
    "layers_block_type": None,
    "hybrid_override_pattern": None,
    "n_routed_experts": None,  # matter to blocks with experts alone
    "num_experts_per_tok": None,
    "num_experts": None,
}
ALIASES = {
    "mamba_n_heads": ("mamba_num_heads",),
    "mamba_d_head": ("mamba_head_dim",),
    "mamba_d_state": ("ssm_state_size",),
    "mamba_n_groups": ("n_groups",),
    "mamba_d_conv": ("conv_kernel",),
    "mamba_conv_bias": ("use_conv_bias",),
    "mamba_proj_bias": ("use_bias",),
    "time_step_min": ("mamba_dt_min",),
    "layers_block_type": ("layer_types",),
}
MAMBA, ATTENTION, FEED_FORWARD, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
LETTERS = {"M": MAMBA, "*": ATTENTION, "-": FEED_FORWARD, "E": EXPERTS}
OLDER = {"mamba": MAMBA, "attention": ATTENTION}
PARTS = {
    MAMBA: ("mamba", ("", ".in_proj", ".conv1d", ".norm", ".out_proj")),
    ATTENTION: ("self_attn", (".q_proj", ".k_proj", ".v_proj", ".o_proj")),
    FEED_FORWARD: ("mlp", (".up_proj", ".down_proj")),
}


@dataclass(frozen=True)
class Place:
    """Where a block of a file stands in the model."""

    layer: int
    kind: str


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(config, DEFAULTS, aliases=ALIASES)
    places, norm = _places(fields), RMS(fields.number("layer_norm_epsilon"))
    fields.require("attention_bias", False)
    fields.require("sliding_window")
    heads = fields.integer("mamba_n_heads") * fields.integer("mamba_d_head")
    mixers: dict[str, Mixer] = dict(
        attention_by_kind(fields, (ATTENTION,), window=None, max_model_len=max_model_len, rotary=False)
    )
    mixers[MAMBA] = mamba2.state_space(
        Fields({"inner": heads, **fields.values}, fields.defaults, aliases=fields.aliases),
        norm=norm,
        inner="inner",
        activation="mamba_hidden_act",
        steps=(fields.number("time_step_min"), float("inf")),
    )
    half = mlp(fields, activation="mlp_hidden_act", bias=fields.flag("mlp_bias"))
    fed = {place.layer for place in places if place.kind == FEED_FORWARD}
    layers = [
        LayerSpec(
            mixer=mixers[place.kind],
            feed_forward=half if place.layer in fed else None,
            norm=norm,
            residual=PreNorm() if place.layer in fed else MixerAlone(),
        )
        for place in places
        if place.kind in mixers
    ]
    return decoder_config(fields, architecture="NemotronHForCausalLM", layers=layers, norm=norm)


def names(config: Mapping[str, Any]) -> Names:
    """What files call the parts of a model, whose blocks are halves of layers."""
    modules = {"embeddings": "model.embed_tokens", "norm_f": "model.norm"}
    for block, place in enumerate(_places(Fields(config, DEFAULTS, aliases=ALIASES))):
        (part, ends), layer = PARTS[place.kind], f"model.layers.{place.layer}"
        norm = "post_attention_layernorm" if place.kind == FEED_FORWARD else "input_layernorm"
        modules[f"layers.{block}.norm"] = f"{layer}.{norm}"
        modules |= {f"layers.{block}.mixer{end}": f"{layer}.{part}{end}" for end in ends}
    return Names(prefix="backbone.", modules=modules)


def _places(fields: Fields) -> list[Place]:
    places: list[Place] = []
    for kind in _blocks(fields):
        if kind != FEED_FORWARD:
            places.append(Place(places[-1].layer + 1 if places else 0, kind))
        elif places and places[-1].kind != FEED_FORWARD:
            places.append(Place(places[-1].layer, kind))
        else:
            raise fields.error(_key(fields), "has an MLP that does not follow a mixer, which is not supported")
    return places


def _blocks(fields: Fields) -> Sequence[str]:
    key = _key(fields)
    given = fields.get(key)
    if not isinstance(given, str | list | tuple) or not 0 < len(given) <= MAX_LAYERS:
        raise fields.error(key, "must say what each block is")
    kinds = [LETTERS.get(one, one) if isinstance(given, str) else OLDER.get(one, one) for one in map(str, given)]
    for kind in kinds:
        if kind == EXPERTS:
            raise fields.error(key, "has blocks with experts, which are not supported")
        if kind not in PARTS:
            raise fields.error(key, f"has blocks of an unknown kind, {kind!r}")
    return kinds


def _key(fields: Fields) -> str:
    return "hybrid_override_pattern" if fields.get("layers_block_type") is None else "layers_block_type"
