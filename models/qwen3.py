"""Qwen 3 (dense): Qwen 2 with a norm of each head of q and k instead of their biases, and a head size of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models import qwen2
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import attention_by_kind, decoder_config, gated_mlp, rms
from llmjax.models.layers.layer import LayerSpec

# What Hugging Face's Qwen3Config means by a missing key.
DEFAULTS = {**qwen2.DEFAULTS, "head_dim": 128, "attention_bias": False}


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(config, DEFAULTS)
    fields.require("mlp_bias", False)
    kinds, norm, mlp = qwen2.windowed_layers(fields), rms(fields), gated_mlp(fields)
    bias = fields.flag("attention_bias")
    attention = attention_by_kind(
        fields,
        kinds,
        window=qwen2.window_of(fields),
        max_model_len=max_model_len,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=norm,
    )
    layers = [LayerSpec(mixer=attention[kind], feed_forward=mlp, norm=norm) for kind in kinds]
    return decoder_config(fields, architecture="Qwen3ForCausalLM", layers=layers, norm=norm)
