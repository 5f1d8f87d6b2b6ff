"""Qwen 3 (dense): Qwen 2 with QK norm instead of biases, and a head size of its own."""

from __future__ import annotations

from llmjax.models import qwen2
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import attention_by_kind, decoder_config, gated_mlp, rms
from llmjax.models.layers.layer import LayerSpec

# What Hugging Face's Qwen3Config means by a missing key.
DEFAULTS = {**qwen2.DEFAULTS, "head_dim": 128, "attention_bias": False}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("mlp_bias", False)
    kinds, norm, mlp = qwen2.windowed_layers(fields), rms(fields), gated_mlp(fields)
    window = qwen2.window_of(fields)
    attention = attention_by_kind(fields, kinds, window=window, bias="attention_bias", qk_norm=norm)
    layers = [LayerSpec(mixer=attention[kind], feed_forward=mlp, norm=norm) for kind in kinds]
    return decoder_config(fields, layers=layers, norm=norm)


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("Qwen3ForCausalLM",), model_types=("qwen3",)),)
