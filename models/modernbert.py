"""ModernBERT: an encoder with rotary embeddings, gated MLPs, and windows on both sides of a token."""

from __future__ import annotations

from llmjax.models.classifiers import classifier_pooler
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import attention_by_kind, decoder_config, gated_mlp, layer_norm, layer_types
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.pooling import Dense, Pooler
from llmjax.models.layers.residual import PreNorm, Residual
from llmjax.models.layers.rope_scaling import rope_parameters
from llmjax.models.names import Names

# What Hugging Face's ModernBertConfig means by a missing key.
DEFAULTS = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "hidden_activation": "gelu",
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
    "classifier_pooling": "cls",
    "classifier_bias": False,
    "classifier_activation": "gelu",
    "tie_word_embeddings": True,
}
THETAS = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
NAMES = Names(
    prefix="model.",
    modules={
        "embeddings.tok_embeddings": "model.embed_tokens",
        "embeddings.norm": "model.embed_norm",
        "final_norm": "model.norm",
        "layers.*.attn_norm": "model.layers.*.input_layernorm",
        "layers.*.attn.Wqkv": "model.layers.*.self_attn.qkv_proj",
        "layers.*.attn.Wo": "model.layers.*.self_attn.o_proj",
        "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
        "layers.*.mlp.Wi": "model.layers.*.mlp.gate_up_proj",
        "layers.*.mlp.Wo": "model.layers.*.mlp.down_proj",
        "head.dense": "head.0.dense",
        "head.norm": "head.0.norm",
        "classifier": "head.1.dense",
    },
)
# The first mixer has no norm of its own: its input is the output of the embedding's norm.
FIRST = Residual(
    before_mixer=None,
    after_mixer=None,
    before_feed_forward=PreNorm().before_feed_forward,
    after_feed_forward=None,
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    return _encoder(fields, Pooler(kind="cls"))


def classifier_from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``; labels of texts and pairs of texts."""
    head = Dense(
        size=fields.integer("hidden_size"),
        bias=fields.flag("classifier_bias"),
        activation=fields.choice("classifier_activation", ("gelu", "relu", "silu", "tanh")),
        norm=layer_norm(fields, "norm_eps", bias=fields.flag("norm_bias")),
    )
    mean = fields.choice("classifier_pooling", ("cls", "mean")) == "mean"
    return _encoder(fields, classifier_pooler(fields, kind="mean" if mean else "cls", before=(head,)))


def _encoder(fields: Fields, pooler: Pooler) -> ModelConfig:
    every = fields.integer("global_attn_every_n_layers")
    kinds = layer_types(
        fields,
        [
            "sliding_attention" if index % every else "full_attention"
            for index in range(fields.integer("num_hidden_layers"))
        ],
    )
    norm = layer_norm(fields, "norm_eps", bias=fields.flag("norm_bias"))
    thetas = {kind: key if fields.get(key) is not None else "global_rope_theta" for kind, key in THETAS.items()}
    attention = attention_by_kind(
        fields,
        kinds,
        window=fields.integer("local_attention") // 2 + 1,  # a token sees half the window on each side
        ropes={kind: rope_parameters(fields, kind, theta=thetas[kind], scaled=False) for kind in kinds},
        bias="attention_bias",
        causal=False,
    )
    mlp = gated_mlp(fields, activation="hidden_activation", bias=fields.flag("mlp_bias"))
    layers = [
        LayerSpec(mixer=attention[kind], feed_forward=mlp, norm=norm, residual=PreNorm() if index else FIRST)
        for index, kind in enumerate(kinds)
    ]
    return decoder_config(fields, layers=layers, norm=norm, pooler=pooler, embedding_norm=norm)


FAMILIES = (
    Family(
        from_hf,
        DEFAULTS,
        architectures=("ModernBertModel", "ModernBertForMaskedLM"),
        model_types=("modernbert",),
        names=NAMES,
    ),
    Family(classifier_from_hf, DEFAULTS, architectures=("ModernBertForSequenceClassification",), names=NAMES),
)
