"""Qwen 3 with experts: Qwen 3 with a router and no shared expert."""

from __future__ import annotations

from llmjax.models import qwen2, qwen2_moe
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    all_windowed,
    attention_by_kind,
    decoder_config,
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


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("mlp_bias", False)
    window = qwen2.window_of(fields)
    kinds, norm = all_windowed(fields, window), rms(fields)
    attention = attention_by_kind(fields, kinds, window=window, bias="attention_bias", qk_norm=norm)
    experts = softmax_experts(fields, inner="moe_intermediate_size", normalize=fields.flag("norm_topk_prob"))
    layers = [
        LayerSpec(mixer=attention[kind], feed_forward=each, norm=norm)
        for kind, each in zip(kinds, qwen2_moe.feed_forwards(fields, experts), strict=True)
    ]
    return decoder_config(fields, layers=layers, norm=norm)


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("Qwen3MoeForCausalLM",), model_types=("qwen3_moe",)),)
