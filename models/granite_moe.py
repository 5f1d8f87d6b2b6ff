"""Granite 3 with experts: Granite with experts in every layer, and in some checkpoints a shared expert; Granite 4, with
Mamba 2 mixers in some or most layers, and in some checkpoints only the shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmjax.models import granite, mamba2
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, gated_mlp, layer_types, softmax_experts
from llmjax.models.layers.layer import FeedForward
from llmjax.models.layers.moe import Experts, SharedExpert
from llmjax.models.names import Names

# What Hugging Face's GraniteMoeConfig means by a missing key.
DEFAULTS = {**granite.DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2}
SHARED_DEFAULTS = {**DEFAULTS, "shared_intermediate_size": 0}
HYBRID_DEFAULTS = {
    **DEFAULTS,
    **mamba2.MAMBA_DEFAULTS,
    "shared_intermediate_size": 1024,
    "layer_types": None,
    "position_embedding_type": None,
}
HYBRID_ALIASES = {"layer_types": ("layers_block_type",)}
KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "full_attention",
    "full_attention": "full_attention",
}
SHARED = "shared_mlp"
SHARED_NAMES = Names(
    modules={
        f"model.layers.*.{SHARED}.input_linear": f"model.layers.*.mlp.{SHARED}.gate_up_proj",
        f"model.layers.*.{SHARED}.output_linear": f"model.layers.*.mlp.{SHARED}.down_proj",
    }
)
DENSE_NAMES = Names(
    modules={
        f"model.layers.*.{SHARED}.input_linear": "model.layers.*.mlp.gate_up_proj",
        f"model.layers.*.{SHARED}.output_linear": "model.layers.*.mlp.down_proj",
    }
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``; with a shared expert in GraniteMoeShared."""
    fields.require("mlp_bias", False)
    return granite.granite_config(fields, _experts(fields))


def hybrid_from_hf(fields: Fields) -> ModelConfig:
    """`from_hf` for GraniteMoeHybrid: Mamba 2 in some layers, and maybe no experts but the shared one."""
    count = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    kinds = [KINDS[kind] for kind in layer_types(fields, ["mamba"] * count, kinds=tuple(KINDS))]
    fields.require("position_embedding_type", "rope", "nope")
    fields.require("normalization_function", "rmsnorm")
    if _has_experts(fields.values):
        feed_forward: FeedForward = _experts(fields)
    else:
        feed_forward = replace(gated_mlp(fields), inner=fields.integer("shared_intermediate_size"))
    values = {key: fields.values[key] for key in fields.values if key not in ("layer_types", "layers_block_type")}
    return granite.granite_config(
        replace(fields, values=values),
        feed_forward,
        rotary=fields.get("position_embedding_type") == "rope",
        mamba=[kind == "mamba" for kind in kinds],
    )


def hybrid_names(config: Mapping[str, Any]) -> Names:
    """Names of tensors in files; the shared MLP may be the only one."""
    return SHARED_NAMES if _has_experts(config) else DENSE_NAMES


def _has_experts(config: Mapping[str, Any]) -> bool:
    return config.get("num_local_experts", DEFAULTS["num_local_experts"]) not in (0, None)


def _experts(fields: Fields) -> Experts:
    # The router's softmax is over the chosen experts, which equals a normalized softmax over all experts.
    experts = softmax_experts(fields, inner="intermediate_size", normalize=True)
    if "shared_intermediate_size" in fields.defaults and (
        inner := fields.integer("shared_intermediate_size", minimum=0)
    ):
        experts = replace(experts, shared=SharedExpert(inner=inner, name=SHARED, gated=False))
    return experts


FAMILIES = (
    Family(from_hf, DEFAULTS, architectures=("GraniteMoeForCausalLM",), model_types=("granitemoe",)),
    Family(
        from_hf,
        SHARED_DEFAULTS,
        architectures=("GraniteMoeSharedForCausalLM",),
        model_types=("granitemoeshared",),
        names=SHARED_NAMES,
    ),
    Family(
        hybrid_from_hf,
        HYBRID_DEFAULTS,
        architectures=("GraniteMoeHybridForCausalLM",),
        model_types=("granitemoehybrid",),
        aliases=HYBRID_ALIASES,
        names=hybrid_names,
    ),
)
