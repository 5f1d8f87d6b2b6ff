"""Mistral: Llama with a sliding window on every layer, unless config.json switches it off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, attention_by_kind, decoder_config, gated_mlp, layer_types, rms
from llmjax.models.layers.layer import FeedForward, LayerSpec

# What Hugging Face's MistralConfig means by a missing key; sliding_window: null is not a missing key.
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(config, DEFAULTS)
    return mistral_config(fields, gated_mlp(fields), architecture="MistralForCausalLM", max_model_len=max_model_len)


def mistral_config(
    fields: Fields, feed_forward: FeedForward, *, architecture: str, max_model_len: int | None
) -> ModelConfig:
    """Layers with a window in all of them or in none, and the same feed-forward half."""
    fields.require("attention_bias", False)
    fields.require("mlp_bias", False)
    window = fields.optional_integer("sliding_window")
    kind = "full_attention" if window is None else "sliding_attention"
    kinds = layer_types(fields, [kind] * fields.integer("num_hidden_layers", maximum=MAX_LAYERS))
    attention, norm = attention_by_kind(fields, kinds, window=window, max_model_len=max_model_len), rms(fields)
    layers = [LayerSpec(mixer=attention[kind], feed_forward=feed_forward, norm=norm) for kind in kinds]
    return decoder_config(fields, architecture=architecture, layers=layers, norm=norm)
