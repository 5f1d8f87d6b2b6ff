"""BLOOM: ALiBi, a norm after the embedding, LayerNorm and an MLP without a gate."""

from __future__ import annotations

from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    full_attention,
    layer_norm,
    uniform_decoder,
)
from llmjax.models.layers.alibi import alibi_slopes
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.mlp import MLP
from llmjax.models.layers.residual import NormedStream, PreNorm
from llmjax.models.names import QKV, Names

# What Hugging Face's BloomConfig means by a missing key; none says how long texts may be.
DEFAULTS = {
    "vocab_size": 250880,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "apply_residual_connection_post_layernorm": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALIASES = {
    "hidden_size": ("n_embed",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("seq_length",),
}
NAMES = Names(
    prefix="transformer.",
    modules={
        "word_embeddings": "model.embed_tokens",
        "word_embeddings_layernorm": "model.embed_norm",
        "ln_f": "model.norm",
        "h.*.input_layernorm": "model.layers.*.input_layernorm",
        "h.*.post_attention_layernorm": "model.layers.*.post_attention_layernorm",
        "h.*.self_attention.query_key_value": "model.layers.*.self_attn.qkv_proj",
        "h.*.self_attention.dense": "model.layers.*.self_attn.o_proj",
        "h.*.mlp.dense_h_to_4h": "model.layers.*.mlp.up_proj",
        "h.*.mlp.dense_4h_to_h": "model.layers.*.mlp.down_proj",
    },
    qkv=QKV.BY_GROUP,
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    heads = fields.integer("num_attention_heads")
    fields.require("num_key_value_heads", heads)
    norm = layer_norm(fields, "layer_norm_epsilon")
    normed = fields.flag("apply_residual_connection_post_layernorm")  # the residual is what the norms return
    layer = LayerSpec(
        mixer=full_attention(fields, rotary=False, slopes=alibi_slopes(heads), qkv_bias=True, o_bias=True),
        feed_forward=MLP(inner=4 * fields.integer("hidden_size"), activation="gelu_pytorch_tanh"),
        norm=norm,
        residual=NormedStream() if normed else PreNorm(),
    )
    return uniform_decoder(fields, layer, embedding_norm=norm)


FAMILIES = (
    Family(
        from_hf, DEFAULTS, architectures=("BloomForCausalLM",), model_types=("bloom",), aliases=ALIASES, names=NAMES
    ),
)
