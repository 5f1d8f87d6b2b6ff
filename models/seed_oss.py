"""Seed-OSS: Llama with a head size of its own, biases on q, k and v, and an optional one on o."""

from __future__ import annotations

from llmjax.models import llama
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

# What Hugging Face's SeedOssConfig means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    "vocab_size": 155136,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "attention_out_bias": False,
    "bos_token_id": 0,
}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    qkv_bias, o_bias = fields.flag("attention_bias"), fields.flag("attention_out_bias")
    layer = LayerSpec(
        mixer=full_attention(fields, qkv_bias=qkv_bias, o_bias=o_bias),
        feed_forward=gated_mlp(fields, bias=fields.flag("mlp_bias")),
        norm=rms(fields),
    )
    return uniform_decoder(fields, layer)


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("SeedOssForCausalLM",), model_types=("seed_oss",)),)
