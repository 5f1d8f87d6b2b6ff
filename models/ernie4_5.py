"""ERNIE 4.5 (dense): Llama with heads rotated in neighboring pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import attention_by_kind, decoder_config, gated_mlp, layer_types, rms
from llmjax.models.layers.layer import LayerSpec

# What Hugging Face's Ernie4_5Config means by a missing key.
DEFAULTS = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "use_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(config, DEFAULTS)
    fields.require("compression_ratio", 1, 1.0)
    kinds, norm, bias = layer_types(fields, kinds=("full_attention",)), rms(fields), fields.flag("use_bias")
    attention = attention_by_kind(
        fields, kinds, window=None, max_model_len=max_model_len, interleaved=True, qkv_bias=bias, o_bias=bias
    )
    layer = LayerSpec(mixer=attention[kinds[0]], feed_forward=gated_mlp(fields, bias=bias), norm=norm)
    return decoder_config(fields, architecture="Ernie4_5ForCausalLM", layers=[layer] * len(kinds), norm=norm)
