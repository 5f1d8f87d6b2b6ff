"""GLM-4.5, 4.6 and 4.7: half of each head rotated, and DeepSeek V3's experts behind the first layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models import deepseek_v2, deepseek_v3
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import attention_by_kind, decoder_config, layer_types, rms
from llmjax.models.layers.layer import LayerSpec

# What Hugging Face's Glm4MoeConfig means by a missing key.
DEFAULTS = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
    "use_qk_norm": False,
    "first_k_dense_replace": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
}


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(config, DEFAULTS)
    fields.require("mlp_bias", False)
    kinds, norm = layer_types(fields, kinds=("full_attention",)), rms(fields)
    attention = attention_by_kind(
        fields,
        kinds,
        window=None,
        max_model_len=max_model_len,
        partial_rotary=True,
        qkv_bias=fields.flag("attention_bias"),
        qk_norm=norm if fields.flag("use_qk_norm") else None,
    )
    halves = deepseek_v2.feed_forwards(fields, deepseek_v3.sigmoid_experts)
    layers = [LayerSpec(mixer=attention[kinds[0]], feed_forward=half, norm=norm) for half in halves]
    return decoder_config(fields, architecture="Glm4MoeForCausalLM", layers=layers, norm=norm)
