"""Gemma 1 and CodeGemma: Llama with scaled embeddings, norms that multiply by 1 + weight, and a tanh GELU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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

# What Hugging Face's GemmaConfig means by a missing key.
DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields = replace(fields, values=_with_tanh_gelu(fields.values))
    fields.require("use_bidirectional_attention", False)
    fields.require("mlp_bias", False)
    attention, norm = full_attention(fields, bias="attention_bias"), rms(fields, plus_one=True)
    layer = LayerSpec(mixer=attention, feed_forward=gated_mlp(fields), norm=norm)
    return uniform_decoder(fields, layer, embedding_scale=fields.integer("hidden_size") ** 0.5)


def _with_tanh_gelu(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The activation that the weights were made for: the first checkpoints name the exact GELU by mistake, and later
    ones correct that in a key of its own."""
    named = config.get("hidden_activation") or config.get("hidden_act", DEFAULTS["hidden_act"])
    return {**config, "hidden_act": "gelu_pytorch_tanh" if named == "gelu" else named}


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("GemmaForCausalLM",), model_types=("gemma",)),)
