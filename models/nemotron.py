"""Nemotron 3 and 4, and Minitron: LayerNorm that multiplies by 1 + weight, half of each head rotated, and MLPs without
a gate and with a squared ReLU."""

from __future__ import annotations

from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import full_attention, mlp, uniform_decoder
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.norm import Layer

# What Hugging Face's NemotronConfig means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    "vocab_size": 256000,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_attention_heads": 48,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "bos_token_id": 2,
    "eos_token_id": 3,
}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    attention = full_attention(fields, partial_rotary=True, bias="attention_bias")
    norm = Layer(fields.number("norm_eps"), plus_one=True)
    feed_forward = mlp(fields, bias=fields.flag("mlp_bias"))
    return uniform_decoder(fields, LayerSpec(mixer=attention, feed_forward=feed_forward, norm=norm))


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("NemotronForCausalLM",), model_types=("nemotron",)),)
