"""OLMoE: Llama with experts in every layer, and norms of q and k over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models import olmo2
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import attention_by_kind, decoder_config, layer_types, rms, softmax_experts
from llmjax.models.layers.layer import LayerSpec

# What Hugging Face's OlmoeConfig means by a missing key.
DEFAULTS = {
    **olmo2.DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(config, DEFAULTS)
    fields.require("mlp_bias", False)
    kinds, norm, bias = layer_types(fields, kinds=("full_attention",)), rms(fields), fields.flag("attention_bias")
    attention = attention_by_kind(
        fields,
        kinds,
        window=None,
        max_model_len=max_model_len,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=norm,
        qk_norm_over="all heads",
    )
    experts = softmax_experts(fields, inner="intermediate_size", normalize=fields.flag("norm_topk_prob"))
    layer = LayerSpec(mixer=attention[kinds[0]], feed_forward=experts, norm=norm)
    return decoder_config(fields, architecture="OlmoeForCausalLM", layers=[layer] * len(kinds), norm=norm)
