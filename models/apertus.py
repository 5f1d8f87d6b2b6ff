"""Apertus: Llama with norms of heads, and MLPs without a gate whose activation is learned in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import attention_by_kind, decoder_config, layer_types, rms
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.mlp import MLP, XIELU
from llmjax.models.names import Names

# What Hugging Face's ApertusConfig means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    "vocab_size": 131072,
    "intermediate_size": 14336,
    "hidden_act": XIELU,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 12_000_000.0,
}
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
NAMES = Names(
    modules={
        "model.layers.*.attention_layernorm": "model.layers.*.input_layernorm",
        "model.layers.*.feedforward_layernorm": "model.layers.*.post_attention_layernorm",
    }
)


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    defaults = DEFAULTS if "rope_parameters" in config else {**DEFAULTS, "rope_scaling": ROPE}
    fields = Fields(config, defaults)
    fields.require("mlp_bias", False)
    kinds, norm, bias = layer_types(fields, kinds=("full_attention",)), rms(fields), fields.flag("attention_bias")
    attention = attention_by_kind(
        fields, kinds, window=None, max_model_len=max_model_len, qkv_bias=bias, o_bias=bias, qk_norm=norm
    )
    half = MLP(inner=fields.integer("intermediate_size"), activation=fields.choice("hidden_act", (XIELU,)), bias=False)
    layers = [LayerSpec(mixer=attention[kind], feed_forward=half, norm=norm) for kind in kinds]
    return decoder_config(fields, architecture="ApertusForCausalLM", layers=layers, norm=norm)
