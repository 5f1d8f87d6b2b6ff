"""Mistral: Llama with a sliding window on every layer, unless config.json switches it off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models.config import ExpertsConfig, ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, decoder_config, layer_types

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
    return mistral_config(Fields(config, DEFAULTS), architecture="MistralForCausalLM", max_model_len=max_model_len)


def mistral_config(
    fields: Fields, *, architecture: str, max_model_len: int | None, experts: ExpertsConfig | None = None
) -> ModelConfig:
    """What Mistral's layers have in common, with plain MLPs or with experts: a window in all of them or in none.

    Args:
        architecture, max_model_len, experts: see ``decoder_config``.
    """
    fields.require("attention_bias", False)
    fields.require("mlp_bias", False)
    window = fields.optional_integer("sliding_window")
    kind = "full_attention" if window is None else "sliding_attention"
    return decoder_config(
        fields,
        architecture=architecture,
        layers=layer_types(fields, [kind] * fields.integer("num_hidden_layers", maximum=MAX_LAYERS)),
        window=window,
        max_model_len=max_model_len,
        experts=experts,
    )
