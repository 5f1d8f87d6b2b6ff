"""OLMo 1: Llama with LayerNorm without weights, and optional clipping of queries, keys and values."""

from __future__ import annotations

from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    full_attention,
    gated_mlp,
    uniform_decoder,
)
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.norm import Layer

# What Hugging Face's OlmoConfig means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    "vocab_size": 50304,
    "max_position_embeddings": 2048,
    "clip_qkv": None,
    "bos_token_id": None,
    "eos_token_id": 50279,
}
EPS = 1e-5  # of norms; no key of config.json says it


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("mlp_bias", False)
    attention = full_attention(fields, bias="attention_bias", clip=fields.optional_number("clip_qkv"))
    norm = Layer(EPS, bias=False, weighted=False)
    return uniform_decoder(fields, LayerSpec(mixer=attention, feed_forward=gated_mlp(fields), norm=norm))


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("OlmoForCausalLM",), model_types=("olmo",)),)
