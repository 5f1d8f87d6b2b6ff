"""Mixtral: Mistral with experts in every layer; the shares of a token's experts add up to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models import mistral
from models.config import ModelConfig
from models.fields import Fields
from models.hf_config import MAX_LAYERS, decoder_config, experts_config, layer_types

# What Hugging Face's MixtralConfig means by a missing key.
DEFAULTS = {
    **mistral.DEFAULTS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``models.model_config``."""
    fields = Fields(config, DEFAULTS)
    fields.require("attention_bias", False)
    fields.require("mlp_bias", False)
    window = fields.optional_integer("sliding_window")
    kind = "full_attention" if window is None else "sliding_attention"
    return decoder_config(
        fields,
        architecture="MixtralForCausalLM",
        layers=layer_types(fields, [kind] * fields.integer("num_hidden_layers", maximum=MAX_LAYERS)),
        window=window,
        max_model_len=max_model_len,
        experts=experts_config(fields, inner="intermediate_size", normalize=True),
    )
