"""GLM-4 9B and edge models (`glm`), and GLM-4-0414 and Z1 (`glm4`): half of each head rotated in neighboring pairs; the
latter also has a norm after each sublayer."""

from __future__ import annotations

from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    full_attention,
    gated_mlp,
    rms,
    uniform_decoder,
)
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
NAMES = Names()  # Llama's names, except for the fused tensors
GLM4_RESIDUAL = Sandwich(
    after_mixer="post_self_attn_layernorm",
    before_feed_forward="post_attention_layernorm",
    after_feed_forward="post_mlp_layernorm",
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    return _glm(fields, PreNorm())


def glm4_from_hf(fields: Fields) -> ModelConfig:
    """`from_hf` for GLM-4-0414."""
    return _glm(fields, GLM4_RESIDUAL)


def _glm(fields: Fields, residual: Residual) -> ModelConfig:
    fields.require("mlp_bias", False)
    bias = fields.flag("attention_bias")
    attention = full_attention(fields, partial_rotary=True, interleaved=True, qkv_bias=bias)
    layer = LayerSpec(mixer=attention, feed_forward=gated_mlp(fields), norm=rms(fields), residual=residual)
    return uniform_decoder(fields, layer)


FAMILIES = (
    Family(from_hf, DEFAULTS, architectures=("GlmForCausalLM",), model_types=("glm",), names=NAMES),
    Family(glm4_from_hf, DEFAULTS, architectures=("Glm4ForCausalLM",), model_types=("glm4",), names=NAMES),
)
