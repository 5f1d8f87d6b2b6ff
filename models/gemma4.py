"""Gemma 4 (text): windowed layers and wider full ones, a norm of values, per-layer embeddings, last layers that read
the keys and values of earlier layers, and in some checkpoints experts beside each MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models import gemma3
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.gemma3n import FULL, LAYER, PER_LAYER_MODULES, SLIDING, embeddings_of_layers, key_sources
from llmjax.models.hf_config import MAX_LAYERS, attention_by_kind, decoder_config, gated_mlp, layer_types, rms
from llmjax.models.layers.attention import Attention
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.moe import Experts, SharedExpert
from llmjax.models.layers.norm import RMS
from llmjax.models.layers.residual import Sandwich, SandwichedMixer
from llmjax.models.layers.rope_scaling import rope_parameters
from llmjax.models.names import Names

# What Hugging Face's Gemma4TextConfig means by a missing key.
DEFAULTS = {
    **{key: value for key, value in gemma3.DEFAULTS.items() if key != "sliding_window_pattern"},
    "vocab_size": 262144,
    "num_hidden_layers": 30,
    "sliding_window": 512,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "enable_moe_block": False,
    "num_experts": None,  # only used with experts
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
    "final_logit_softcapping": None,
    "use_bidirectional_attention": None,
}
PERIOD = 6  # of layers without windows, where no key says which they are
DENSE = "dense"
_EXPERTS = {
    **{f"{LAYER}.mlp.{part}_proj": f"{LAYER}.mlp.{DENSE}.{part}_proj" for part in ("gate", "up", "down")},
    f"{LAYER}.router": f"{LAYER}.mlp.gate",
    f"{LAYER}.router.proj": f"{LAYER}.mlp.gate",
    f"{LAYER}.pre_feedforward_layernorm": f"{LAYER}.mlp.before_shared",
    f"{LAYER}.post_feedforward_layernorm_1": f"{LAYER}.mlp.after_shared",
    f"{LAYER}.pre_feedforward_layernorm_2": f"{LAYER}.mlp.before_experts",
    f"{LAYER}.post_feedforward_layernorm_2": f"{LAYER}.mlp.after_experts",
}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("use_bidirectional_attention", False, "vision")
    fields.require("mlp_bias", False)
    count = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    kinds = list(layer_types(fields, [SLIDING if (i + 1) % PERIOD else FULL for i in range(count)]))
    kinds[-1] = FULL  # transformers ignores what the file says here
    norm, mlp = rms(fields), gated_mlp(fields, activation="hidden_activation")
    experts = _experts(fields, norm) if fields.flag("enable_moe_block") else None
    if experts is not None and fields.flag("use_double_wide_mlp"):
        raise fields.error("use_double_wide_mlp", "is not supported beside experts")
    attention = {kind: _attention(fields, kind, norm) for kind in dict.fromkeys(kinds)}
    sources = key_sources(fields, kinds)
    per_layer, layers = embeddings_of_layers(fields, norm), []
    for kind, source in zip(kinds, sources, strict=True):
        wide = source is not None and fields.flag("use_double_wide_mlp")
        layers.append(
            LayerSpec(
                mixer=replace(attention[kind], reads_only=source is not None),
                feed_forward=experts or (replace(mlp, inner=2 * mlp.inner) if wide else mlp),
                norm=norm,
                residual=Sandwich() if experts is None else SandwichedMixer(),
                state_of=source,
                per_layer=per_layer,
                scaled=True,
                in_order=kind == FULL,
            )
        )
    return decoder_config(
        fields,
        layers=layers,
        norm=norm,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        final_softcap=fields.optional_number("final_logit_softcapping"),
        per_layer=per_layer,
    )


def names(config: Mapping[str, Any]) -> Names:
    """Names of tensors in files; the MLPs are shared experts in models with experts."""
    return Names(modules=PER_LAYER_MODULES | _EXPERTS if config.get("enable_moe_block") is True else PER_LAYER_MODULES)


def _experts(fields: Fields, norm: RMS) -> Experts:
    count, per_token = fields.integer("num_experts"), fields.integer("top_k_experts")
    if per_token > count:
        raise fields.error("top_k_experts", f"is more than there are experts, {count}")
    return Experts(
        count=count,
        per_token=per_token,
        inner=fields.integer("moe_intermediate_size"),
        activation=fields.choice("hidden_activation", ACTIVATIONS),
        normalize=True,
        shared=SharedExpert(inner=fields.integer("intermediate_size"), name=DENSE, gated=False),
        own_norms=norm,
    )


def _attention(fields: Fields, kind: str, norm: RMS) -> Attention:
    same = kind == FULL and fields.flag("attention_k_eq_v")
    own = dict(fields.values)
    if kind == FULL:
        # Transformers 5 writes what differs by layer.
        written = fields.mapping("per_layer_config")
        own |= {key: value for layer in written.values() if isinstance(layer, Mapping) for key, value in layer.items()}
        if not written:
            own["head_dim"] = fields.integer("global_head_dim")
            if same and fields.get("num_global_key_value_heads") is not None:
                own["num_key_value_heads"] = fields.integer("num_global_key_value_heads")
    known = replace(fields, values=own)
    rope = rope_parameters(known if "rope_parameters" in own else replace(known, values=own | _DEFAULT_ROPE), kind)
    proportional = rope.get("rope_type") == "proportional"
    plain = {"rope_theta": rope.get("rope_theta")} if proportional else dict(rope.values)
    made = attention_by_kind(
        known,
        (kind,),
        window=fields.optional_integer("sliding_window"),
        ropes={kind: Fields(plain, {**rope.defaults, "rope_type": "default", "partial_rotary_factor": 1.0}, rope.name)},
        scale=1.0,
        qk_norm=norm,
        v_norm=RMS(norm.eps, weighted=False),
        values_of_keys=same,
        bias="attention_bias",
    )[kind]
    if not proportional:
        return made
    # The first frequencies of a fully rotated head; the other entries are not rotated.
    assert made.rope is not None
    turned = int(min(rope.number("partial_rotary_factor"), 1.0) * made.head_dim // 2)
    factor = rope.optional_number("factor") or 1.0
    frequencies = tuple(f / factor if i < turned else 0.0 for i, f in enumerate(made.rope.inv_freq))
    return replace(made, rope=replace(made.rope, inv_freq=frequencies))


_DEFAULT_ROPE = {"rope_parameters": DEFAULTS["rope_parameters"]}


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("Gemma4ForCausalLM",), model_types=("gemma4_text",), names=names),)
