"""Arcee (AFM): Llama whose MLPs have no gate and square what is above zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import attention_by_kind, decoder_config, layer_types, mlp, rms
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


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(config, DEFAULTS)
    kinds, norm, bias = layer_types(fields, kinds=("full_attention",)), rms(fields), fields.flag("attention_bias")
    attention = attention_by_kind(fields, kinds, window=None, max_model_len=max_model_len, qkv_bias=bias, o_bias=bias)
    half = mlp(fields, bias=fields.flag("mlp_bias"))
    layers = [LayerSpec(mixer=attention[kind], feed_forward=half, norm=norm) for kind in kinds]
    return decoder_config(fields, architecture="ArceeForCausalLM", layers=layers, norm=norm)
