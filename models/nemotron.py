"""Nemotron 3 and 4, and Minitron: layer norms with weights of about zero, half of each head rotated, and MLPs without
gates that square what is above zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import attention_by_kind, decoder_config, layer_types, mlp
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


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(config, DEFAULTS)
    kinds, bias = layer_types(fields, kinds=("full_attention",)), fields.flag("attention_bias")
    norm, half = Layer(fields.number("norm_eps"), plus_one=True), mlp(fields, bias=fields.flag("mlp_bias"))
    attention = attention_by_kind(
        fields, kinds, window=None, max_model_len=max_model_len, partial_rotary=True, qkv_bias=bias, o_bias=bias
    )
    layers = [LayerSpec(mixer=attention[kind], feed_forward=half, norm=norm) for kind in kinds]
    return decoder_config(fields, architecture="NemotronForCausalLM", layers=layers, norm=norm)
