"""gte (Alibaba's "new" BERT, arXiv:2407.19669): BERT with rotary embeddings and gated MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmjax.models.classifiers import classifier_pooler
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    full_attention,
    gated_mlp,
    layer_norm,
    uniform_decoder,
)
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.pooling import Dense, Pooler
from llmjax.models.layers.residual import PostNorm
from llmjax.models.names import Names

# What Hugging Face's GteConfig means by a missing key.
DEFAULTS = {
    "vocab_size": 250048,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "max_position_embeddings": 8192,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-12,
    "rope_theta": 160000.0,
    "tie_word_embeddings": True,
}
# The defaults of the code that came with the published models.
NEW_DEFAULTS = {**DEFAULTS, "vocab_size": 30528, "max_position_embeddings": 2048, "rope_theta": 10000.0}
# The only values allowed for that code's other keys, which change the mathematics.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "layer_norm_type": ("layer_norm",),
    "logn_attention_clip1": (False,),
    "logn_attention_scale": (False,),
    "position_embedding_type": ("rope",),
}
MODULES = {
    "embeddings.word_embeddings": "model.embed_tokens",
    "embeddings.token_type_embeddings": "model.embed_types",
    "embeddings.LayerNorm": "model.embed_norm",
    "layers.*.post_attention_layernorm": "model.layers.*.input_layernorm",
    "layers.*.post_mlp_layernorm": "model.layers.*.post_attention_layernorm",
    # The names in the published models.
    "encoder.layer.*.attention.qkv_proj": "model.layers.*.self_attn.qkv_proj",
    "encoder.layer.*.attention.o_proj": "model.layers.*.self_attn.o_proj",
    "encoder.layer.*.attn_ln": "model.layers.*.input_layernorm",
    "encoder.layer.*.mlp.up_gate_proj": "model.layers.*.mlp.up_gate_proj",
    "encoder.layer.*.mlp.down_proj": "model.layers.*.mlp.down_proj",
    "encoder.layer.*.mlp_ln": "model.layers.*.post_attention_layernorm",
}
HEAD = {"pooler.dense": "head.0.dense", "classifier": "head.1.dense"}
NAMES, NEW_NAMES = Names(prefix="model.", modules=MODULES), Names(prefix="new.", modules=MODULES)
NEW_CLASSIFIER_NAMES = replace(NEW_NAMES, modules=MODULES | HEAD)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    for key, neutral in NEUTRAL.items():
        fields.require(key, *neutral)
    norm, attention = layer_norm(fields), full_attention(fields, qkv_bias=True, o_bias=True, causal=False)
    feed_forward = replace(gated_mlp(fields), down_bias=True)
    return uniform_decoder(
        fields,
        LayerSpec(mixer=attention, feed_forward=feed_forward, norm=norm, residual=PostNorm()),
        norm=None,
        pooler=Pooler(kind="cls"),
        token_types=fields.integer("type_vocab_size", minimum=0) or None,
        embedding_norm=norm,
    )


def new_classifier_from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``; labels of texts and pairs of texts."""
    before = (Dense(size=fields.integer("hidden_size"), activation="tanh"),)
    pooler = classifier_pooler(fields, kind="cls", before=before)
    return replace(from_hf(fields), pooler=pooler)


FAMILIES = (
    Family(from_hf, DEFAULTS, architectures=("GteModel",), model_types=("gte",), names=NAMES),
    Family(
        from_hf,
        NEW_DEFAULTS,
        architectures=("NewModel", "NewForTokenClassification"),
        model_types=("new",),
        names=NEW_NAMES,
    ),
    Family(
        new_classifier_from_hf,
        NEW_DEFAULTS,
        architectures=("NewForSequenceClassification",),
        names=NEW_CLASSIFIER_NAMES,
    ),
)
