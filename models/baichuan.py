"""Baichuan 1 and 2: Llama with one matrix for q, k and v; 13B with ALiBi; Baichuan 2 with rows of length one in its
head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import attention_by_kind, decoder_config, gated_mlp, layer_types, rms
from llmjax.models.layers.alibi import alibi_slopes
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.names import Names

# What BaiChuanConfig, which came with the checkpoints, means by a missing key.
DEFAULTS = {**llama.DEFAULTS, "vocab_size": 64000, "max_position_embeddings": 4096}
ALIASES = {"max_position_embeddings": ("model_max_length",)}
NAMES = Names(modules={"model.layers.*.self_attn.W_pack": "model.layers.*.self_attn.qkv_proj"})
# No key says these: the first sizes of models with rope, and the vocabulary of the second generation.
ROTATED_SIZE = 4096
UNIT_HEAD_VOCABULARY = 125696


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    # The first model, with a capital C, is rotated whatever its size.
    return _baichuan(config, max_model_len, rotary=True)


def by_size_from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """`from_hf` for BaichuanForCausalLM, 13B of which has ALiBi."""
    size = Fields(config, DEFAULTS).integer("hidden_size")
    return _baichuan(config, max_model_len, rotary=size == ROTATED_SIZE)


def _baichuan(config: Mapping[str, Any], max_model_len: int | None, *, rotary: bool) -> ModelConfig:
    fields = Fields(config, DEFAULTS, aliases=ALIASES)
    for key in ("attention_bias", "mlp_bias"):
        fields.require(key, False)
    heads = fields.integer("num_attention_heads")
    fields.require("num_key_value_heads", heads)
    kinds, norm = layer_types(fields, kinds=("full_attention",)), rms(fields)
    attention = attention_by_kind(
        fields,
        kinds,
        window=None,
        max_model_len=max_model_len,
        rotary=rotary,
        slopes=None if rotary else alibi_slopes(heads),
    )
    layer = LayerSpec(mixer=attention[kinds[0]], feed_forward=gated_mlp(fields), norm=norm)
    return decoder_config(
        fields,
        architecture="BaichuanForCausalLM",
        layers=[layer] * len(kinds),
        norm=norm,
    )
