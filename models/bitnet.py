"""BitNet b1.58: Llama with a norm before the last product of each half, and weights of -1, 0 and 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import attention_by_kind, decoder_config, gated_mlp, layer_types, rms
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.names import Names

# What Hugging Face's BitNetConfig means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    "vocab_size": 128256,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 30,
    "num_attention_heads": 20,
    "num_key_value_heads": 5,
    "hidden_act": "relu2",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
NAMES = Names(
    modules={
        "model.layers.*.self_attn.attn_sub_norm": "model.layers.*.self_attn.o_norm",
        "model.layers.*.mlp.ffn_sub_norm": "model.layers.*.mlp.down_norm",
    }
)


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(config, DEFAULTS)
    fields.require("mlp_bias", False)
    kinds, norm, bias = layer_types(fields, kinds=("full_attention",)), rms(fields), fields.flag("attention_bias")
    attention = attention_by_kind(
        fields, kinds, window=None, max_model_len=max_model_len, qkv_bias=bias, o_bias=bias, o_norm=norm
    )
    half = replace(gated_mlp(fields), down_norm=norm)
    layers = [LayerSpec(mixer=attention[kind], feed_forward=half, norm=norm) for kind in kinds]
    return decoder_config(fields, architecture="BitNetForCausalLM", layers=layers, norm=norm)
