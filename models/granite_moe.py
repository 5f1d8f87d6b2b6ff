"""Granite 3 with experts: Granite with a router in every layer, and in some checkpoints an expert that every token goes
through; Granite 4 without state spaces, which has that one alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmjax.models import granite
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, gated_mlp, layer_types, softmax_experts
from llmjax.models.layers.moe import SharedExpert
from llmjax.models.names import Names

# What Hugging Face's GraniteMoeConfig means by a missing key.
DEFAULTS = {**granite.DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2}
SHARED_DEFAULTS = {**DEFAULTS, "shared_intermediate_size": 0}
HYBRID_DEFAULTS = {**DEFAULTS, "shared_intermediate_size": 1024}
SHARED = "shared_mlp"
SHARED_NAMES = Names(
    modules={
        f"model.layers.*.{SHARED}.input_linear": f"model.layers.*.mlp.{SHARED}.gate_up_proj",
        f"model.layers.*.{SHARED}.output_linear": f"model.layers.*.mlp.{SHARED}.down_proj",
    }
)
HYBRID_NAMES = Names(
    modules={
        f"model.layers.*.{SHARED}.input_linear": "model.layers.*.mlp.gate_up_proj",
        f"model.layers.*.{SHARED}.output_linear": "model.layers.*.mlp.down_proj",
    }
)


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    return _with_experts(Fields(config, DEFAULTS), "GraniteMoeForCausalLM", max_model_len)


def shared_from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """`from_hf` for GraniteMoeShared."""
    return _with_experts(Fields(config, SHARED_DEFAULTS), "GraniteMoeSharedForCausalLM", max_model_len)


def hybrid_from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """`from_hf` for GraniteMoeHybrid whose layers all have attention, and no experts."""
    fields = Fields(config, HYBRID_DEFAULTS)
    count = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    if "mamba" in layer_types(fields, ["mamba"] * count, kinds=("attention", "full_attention")):
        raise fields.error("layer_types", "means state spaces, which are not supported")
    fields.require("num_local_experts", 0)
    fields.require("position_embedding_type", "rope", "nope")
    mlp = replace(gated_mlp(fields), inner=fields.integer("shared_intermediate_size"))
    return granite.granite_config(
        replace(fields, values={**config, "layer_types": None}),
        mlp,
        architecture="GraniteMoeHybridForCausalLM",
        max_model_len=max_model_len,
        rotary=fields.get("position_embedding_type") == "rope",
    )


def _with_experts(fields: Fields, architecture: str, max_model_len: int | None) -> ModelConfig:
    fields.require("mlp_bias", False)
    # The router's softmax is over a token's experts alone, which is as if shares over all were normalized.
    experts = softmax_experts(fields, inner="intermediate_size", normalize=True)
    if "shared_intermediate_size" in fields.defaults and (
        inner := fields.integer("shared_intermediate_size", minimum=0)
    ):
        experts = replace(experts, shared=SharedExpert(inner=inner, name=SHARED, gated=False))
    return granite.granite_config(fields, experts, architecture=architecture, max_model_len=max_model_len)
