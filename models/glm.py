"""GLM-4 9B and edge models (`glm`), and GLM-4-0414 and Z1 (`glm4`): half of each head rotated in neighboring pairs; the
latter with a norm behind each half too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import attention_by_kind, decoder_config, gated_mlp, layer_types, rms
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.residual import PreNorm, Residual, Sandwich
from llmjax.models.names import Names

# What Hugging Face's GlmConfig and Glm4Config mean by a missing key.
DEFAULTS = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "eos_token_id": [151329, 151336, 151338],
}
NAMES = Names()  # Llama's, but for what is fused
GLM4_RESIDUAL = Sandwich(
    after_mixer="post_self_attn_layernorm",
    before_feed_forward="post_attention_layernorm",
    after_feed_forward="post_mlp_layernorm",
)


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    return _glm(config, "GlmForCausalLM", PreNorm(), max_model_len)


def glm4_from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """`from_hf` for GLM-4-0414."""
    return _glm(config, "Glm4ForCausalLM", GLM4_RESIDUAL, max_model_len)


def _glm(config: Mapping[str, Any], architecture: str, residual: Residual, max_model_len: int | None) -> ModelConfig:
    fields = Fields(config, DEFAULTS)
    fields.require("mlp_bias", False)
    kinds, norm = layer_types(fields, kinds=("full_attention",)), rms(fields)
    attention = attention_by_kind(
        fields,
        kinds,
        window=None,
        max_model_len=max_model_len,
        partial_rotary=True,
        interleaved=True,
        qkv_bias=fields.flag("attention_bias"),
    )
    layer = LayerSpec(mixer=attention[kinds[0]], feed_forward=gated_mlp(fields), norm=norm, residual=residual)
    return decoder_config(fields, architecture=architecture, layers=[layer] * len(kinds), norm=norm)
