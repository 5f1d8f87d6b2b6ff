"""Qwen 3 with experts: Qwen 3 with a router, and no expert that every token goes through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models import qwen2, qwen2_moe
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    MAX_LAYERS,
    attention_by_kind,
    decoder_config,
    layer_types,
    rms,
    softmax_experts,
)
from llmjax.models.layers.layer import LayerSpec

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
    kinds = layer_types(fields, [kind] * fields.integer("num_hidden_layers", maximum=MAX_LAYERS))
    norm, bias = rms(fields), fields.flag("attention_bias")
    attention = attention_by_kind(
        fields, kinds, window=window, max_model_len=max_model_len, qkv_bias=bias, o_bias=bias, qk_norm=norm
    )
    experts = softmax_experts(fields, inner="moe_intermediate_size", normalize=fields.flag("norm_topk_prob"))
    layers = [
        LayerSpec(mixer=attention[kind], feed_forward=feed_forward, norm=norm)
        for kind, feed_forward in zip(kinds, qwen2_moe.feed_forwards(fields, experts), strict=True)
    ]
    return decoder_config(fields, architecture="Qwen3MoeForCausalLM", layers=layers, norm=norm)
