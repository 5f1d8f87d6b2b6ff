"""Baichuan 1 and 2: Llama with one matrix for q, k and v; 13B with ALiBi; Baichuan 2 normalizes the rows of
its head."""

from __future__ import annotations

from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    full_attention,
    gated_mlp,
    rms,
    uniform_decoder,
)
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


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    # The first model, with a capital C, is rotated whatever its size.
    return _baichuan(fields, rotary=True)


def by_size_from_hf(fields: Fields) -> ModelConfig:
    """`from_hf` for BaichuanForCausalLM, 13B of which has ALiBi."""
    return _baichuan(fields, rotary=fields.integer("hidden_size") == ROTATED_SIZE)


def _baichuan(fields: Fields, *, rotary: bool) -> ModelConfig:
    for key in ("attention_bias", "mlp_bias"):
        fields.require(key, False)
    heads = fields.integer("num_attention_heads")
    fields.require("num_key_value_heads", heads)
    attention = full_attention(fields, rotary=rotary, slopes=None if rotary else alibi_slopes(heads))
    return uniform_decoder(fields, LayerSpec(mixer=attention, feed_forward=gated_mlp(fields), norm=rms(fields)))


FAMILIES = (
    Family(from_hf, DEFAULTS, architectures=("BaiChuanForCausalLM",), aliases=ALIASES, names=NAMES),
    Family(
        by_size_from_hf,
        DEFAULTS,
        architectures=("BaichuanForCausalLM",),
        model_types=("baichuan",),
        aliases=ALIASES,
        names=NAMES,
        unit_head_vocabulary=UNIT_HEAD_VOCABULARY,
    ),
)
