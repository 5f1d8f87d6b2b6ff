"""Seed-OSS: Llama with a head size of its own, and biases on q, k and v that o need not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import attention_by_kind, decoder_config, gated_mlp, layer_types, rms
from llmjax.models.layers.layer import LayerSpec

# What Hugging Face's SeedOssConfig means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    "vocab_size": 155136,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "attention_out_bias": False,
    "bos_token_id": 0,
}


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(config, DEFAULTS)
    kinds, norm = layer_types(fields, kinds=("full_attention",)), rms(fields)
    attention = attention_by_kind(
        fields,
        kinds,
        window=None,
        max_model_len=max_model_len,
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_out_bias"),
    )
    mlp = gated_mlp(fields, bias=fields.flag("mlp_bias"))
    layer = LayerSpec(mixer=attention[kinds[0]], feed_forward=mlp, norm=norm)
    return decoder_config(fields, architecture="SeedOssForCausalLM", layers=[layer] * len(kinds), norm=norm)
