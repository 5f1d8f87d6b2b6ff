"""BERT and RoBERTa: encoders, whose tokens see the whole text; norms come after the residual sums."""

from __future__ import annotations

from dataclasses import replace

from llmjax.models.classifiers import classifier_pooler
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    full_attention,
    layer_norm,
    mlp,
    uniform_decoder,
)
from llmjax.models.layers.embedding import LearnedPositions
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.pooling import Dense, Pooler
from llmjax.models.layers.residual import PostNorm
from llmjax.models.names import Names

# What Hugging Face's BertConfig means by a missing key.
DEFAULTS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "tie_word_embeddings": True,
}
ROBERTA_DEFAULTS = {**DEFAULTS, "vocab_size": 50265, "pad_token_id": 1}
XLM_ROBERTA_DEFAULTS = {**DEFAULTS, "vocab_size": 30522, "pad_token_id": 1}
MODULES = {
    "embeddings.word_embeddings": "model.embed_tokens",
    "embeddings.position_embeddings": "model.embed_positions",
    "embeddings.token_type_embeddings": "model.embed_types",
    "embeddings.LayerNorm": "model.embed_norm",
    "encoder.layer.*.attention.self.query": "model.layers.*.self_attn.q_proj",
    "encoder.layer.*.attention.self.key": "model.layers.*.self_attn.k_proj",
    "encoder.layer.*.attention.self.value": "model.layers.*.self_attn.v_proj",
    "encoder.layer.*.attention.output.dense": "model.layers.*.self_attn.o_proj",
    "encoder.layer.*.attention.output.LayerNorm": "model.layers.*.input_layernorm",
    "encoder.layer.*.intermediate.dense": "model.layers.*.mlp.up_proj",
    "encoder.layer.*.output.dense": "model.layers.*.mlp.down_proj",
    "encoder.layer.*.output.LayerNorm": "model.layers.*.post_attention_layernorm",
}
NAMES = Names(prefix="bert.", modules=MODULES)
CLASSIFIER_NAMES = Names(
    prefix="bert.", modules={**MODULES, "pooler.dense": "head.0.dense", "classifier": "head.1.dense"}
)
ROBERTA_NAMES = Names(
    prefix="roberta.",
    modules={
        **MODULES,
        "classifier.dense": "head.0.dense",
        "classifier.out_proj": "head.1.dense",
        # The names in jina-reranker-v2.
        "emb_ln": "model.embed_norm",
        "encoder.layers.*.mixer.Wqkv": "model.layers.*.self_attn.qkv_proj",
        "encoder.layers.*.mixer.out_proj": "model.layers.*.self_attn.o_proj",
        "encoder.layers.*.norm1": "model.layers.*.input_layernorm",
        "encoder.layers.*.mlp.fc1": "model.layers.*.mlp.up_proj",
        "encoder.layers.*.mlp.fc2": "model.layers.*.mlp.down_proj",
        "encoder.layers.*.norm2": "model.layers.*.post_attention_layernorm",
    },
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    return _encoder(fields, pooler=Pooler(kind="cls"))


def colbert_from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``; the layers of ColBERT, whose matrix for tokens the checkpoint's reader adds."""
    fields.require("model_type", "bert")
    return from_hf(fields)


def classifier_from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``; labels of texts and pairs of texts."""
    return _encoder(fields, pooler=_classifier(fields))


def roberta_from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    return _roberta(fields, pooler=Pooler(kind="cls"))


def roberta_classifier_from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``; labels of texts and pairs of texts."""
    return _roberta(fields, pooler=_classifier(fields))


def _classifier(fields: Fields) -> Pooler:
    return classifier_pooler(fields, kind="cls", before=(Dense(size=fields.integer("hidden_size"), activation="tanh"),))


def _roberta(fields: Fields, *, pooler: Pooler) -> ModelConfig:
    """Positions count from after the padding token's row."""
    return _encoder(fields, pooler=pooler, offset=fields.integer("pad_token_id", minimum=0) + 1)


def _encoder(fields: Fields, *, pooler: Pooler, offset: int = 0) -> ModelConfig:
    fields.require("position_embedding_type", "absolute")
    fields.require("is_decoder", False)
    fields.require("embedding_size", fields.integer("hidden_size"))
    count = fields.integer("max_position_embeddings") - offset
    if count < 1:
        raise fields.error("max_position_embeddings", f"leaves no position after the {offset} rows that are not used")
    norm = layer_norm(fields)
    attention = full_attention(fields, rotary=False, qkv_bias=True, o_bias=True, causal=False)
    model = uniform_decoder(
        fields,
        LayerSpec(mixer=attention, feed_forward=mlp(fields), norm=norm, residual=PostNorm()),
        norm=None,
        pooler=pooler,
        positions=LearnedPositions(count=count, offset=offset),
        token_types=fields.integer("type_vocab_size"),
        embedding_norm=norm,
    )
    return replace(model, max_position=count)


FAMILIES = (
    Family(from_hf, DEFAULTS, architectures=("BertModel", "BertForMaskedLM"), model_types=("bert",), names=NAMES),
    Family(colbert_from_hf, {**DEFAULTS, "model_type": "bert"}, architectures=("HF_ColBERT",), names=NAMES),
    Family(classifier_from_hf, DEFAULTS, architectures=("BertForSequenceClassification",), names=CLASSIFIER_NAMES),
    Family(
        roberta_from_hf,
        ROBERTA_DEFAULTS,
        architectures=("RobertaModel", "RobertaForMaskedLM"),
        model_types=("roberta",),
        names=ROBERTA_NAMES,
    ),
    Family(
        roberta_classifier_from_hf,
        ROBERTA_DEFAULTS,
        architectures=("RobertaForSequenceClassification",),
        names=ROBERTA_NAMES,
    ),
    Family(
        roberta_from_hf,
        XLM_ROBERTA_DEFAULTS,
        architectures=("XLMRobertaModel", "XLMRobertaForMaskedLM"),
        model_types=("xlm-roberta",),
        names=ROBERTA_NAMES,
    ),
    Family(
        roberta_classifier_from_hf,
        XLM_ROBERTA_DEFAULTS,
        architectures=("XLMRobertaForSequenceClassification",),
        names=ROBERTA_NAMES,
    ),
)
