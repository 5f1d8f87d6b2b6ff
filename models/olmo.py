"""OLMo 1: Llama whose norms take the mean away too and have no weights, and which may clip queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import attention_by_kind, decoder_config, gated_mlp, layer_types
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.norm import Layer

# What Hugging Face's OlmoConfig means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    "vocab_size": 50304,
    "max_position_embeddings": 2048,
    "clip_qkv": None,
    "bos_token_id": None,
    "eos_token_id": 50279,
}
EPS = 1e-5  # of norms, which no key says


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(config, DEFAULTS)
    fields.require("mlp_bias", False)
    kinds, bias = layer_types(fields, kinds=("full_attention",)), fields.flag("attention_bias")
    norm, half = Layer(EPS, bias=False, weighted=False), gated_mlp(fields)
    attention = attention_by_kind(
        fields,
        kinds,
        window=None,
        max_model_len=max_model_len,
        qkv_bias=bias,
        o_bias=bias,
        clip=fields.optional_number("clip_qkv"),
    )
    layers = [LayerSpec(mixer=attention[kind], feed_forward=half, norm=norm) for kind in kinds]
    return decoder_config(fields, architecture="OlmoForCausalLM", layers=layers, norm=norm)
