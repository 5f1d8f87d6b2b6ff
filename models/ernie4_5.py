"""ERNIE 4.5 (dense): Llama with heads rotated in neighboring pairs."""

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

# What Hugging Face's Ernie4_5Config means by a missing key.
DEFAULTS = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "use_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("compression_ratio", 1, 1.0)
    attention = full_attention(fields, interleaved=True, bias="use_bias")
    feed_forward = gated_mlp(fields, bias=fields.flag("use_bias"))
    return uniform_decoder(fields, LayerSpec(mixer=attention, feed_forward=feed_forward, norm=rms(fields)))


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("Ernie4_5ForCausalLM",), model_types=("ernie4_5",)),)
