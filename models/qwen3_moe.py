"""Qwen 3 with experts: Qwen 3 with a router, and no expert that every token goes through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models import qwen2, qwen2_moe
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, decoder_config, experts_config, layer_types

# What Hugging Face's Qwen3MoeConfig means by a missing key.
DEFAULTS = {
    **qwen2.DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
    "mlp_only_layers": (),
}


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(config, DEFAULTS)
    fields.require("mlp_bias", False)
    window = qwen2.window_of(fields)
    kind = "full_attention" if window is None else "sliding_attention"
    return decoder_config(
        fields,
        architecture="Qwen3MoeForCausalLM",
        layers=layer_types(fields, [kind] * fields.integer("num_hidden_layers", maximum=MAX_LAYERS)),
        window=window,
        max_model_len=max_model_len,
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_bias"),
        qk_norm=True,
        experts=experts_config(fields, inner="moe_intermediate_size", normalize=fields.flag("norm_topk_prob")),
        dense_layers=qwen2_moe.dense_layers(fields),
    )
