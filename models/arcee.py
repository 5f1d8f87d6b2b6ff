"""Arcee (AFM): Llama whose MLPs have no gate and a squared ReLU."""

from __future__ import annotations

from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    full_attention,
    mlp,
    rms,
    uniform_decoder,
)
from llmjax.models.layers.layer import LayerSpec

# What Hugging Face's ArceeConfig means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    attention, feed_forward = full_attention(fields, bias="attention_bias"), mlp(fields, bias=fields.flag("mlp_bias"))
    return uniform_decoder(fields, LayerSpec(mixer=attention, feed_forward=feed_forward, norm=rms(fields)))


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("ArceeForCausalLM",), model_types=("arcee",)),)
