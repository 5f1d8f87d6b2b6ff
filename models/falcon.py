"""Falcon: 7B (one key head, parallel sublayers after one norm), 40B, 180B and 2-11B (grouped heads, a norm for each
sublayer or one for both), and RefinedWeb 1B and 7B (ALiBi, sequential sublayers)."""

from __future__ import annotations

from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    full_attention,
    layer_norm,
    mlp,
    uniform_decoder,
)
from llmjax.models.layers.alibi import alibi_slopes
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.residual import Parallel, PreNorm, Residual
from llmjax.models.names import QKV, Names

# What Hugging Face's FalconConfig means by a missing key.
DEFAULTS = {
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "activation": "gelu",
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "alibi": False,
    "bias": False,
    "multi_query": True,
    "new_decoder_architecture": False,
    "parallel_attn": True,
    "tie_word_embeddings": True,
    "bos_token_id": 11,
    "eos_token_id": 11,
}
ALIASES = {
    "hidden_size": ("n_embed",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "num_kv_heads": ("n_head_kv",),
}
NAMES = Names(
    prefix="transformer.",
    modules={
        "word_embeddings": "model.embed_tokens",
        "ln_f": "model.norm",
        "h.*.input_layernorm": "model.layers.*.input_layernorm",
        "h.*.ln_attn": "model.layers.*.input_layernorm",
        "h.*.ln_mlp": "model.layers.*.post_attention_layernorm",
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
    fields.require("apply_residual_connection_post_layernorm", False)
    heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    alibi, bias = fields.flag("alibi"), fields.flag("bias")
    scale = max(hidden_size // heads, 1) ** -0.5  # fewer than one is refused with the heads
    attention = full_attention(
        fields,
        rotary=not alibi,
        kv_heads=_kv_heads(fields, heads),
        # Biases are scaled as products of queries and keys are.
        slopes=tuple(slope * scale for slope in alibi_slopes(heads)) if alibi else None,
        bias="bias",
    )
    inner = fields.optional_integer("ffn_hidden_size") or 4 * hidden_size
    layer = LayerSpec(
        mixer=attention,
        feed_forward=mlp(fields, inner=inner, activation="activation", bias=bias),
        norm=layer_norm(fields, "layer_norm_epsilon"),
        residual=_residual(fields),
    )
    return uniform_decoder(fields, layer)


def _kv_heads(fields: Fields, heads: int) -> int:
    if fields.flag("new_decoder_architecture"):
        kv_heads = fields.optional_integer("num_kv_heads") or heads
        if heads % kv_heads:
            raise fields.error("num_kv_heads", f"does not divide num_attention_heads = {heads}")
        return kv_heads
    return 1 if fields.flag("multi_query") else heads


def _residual(fields: Fields) -> Residual:
    if not fields.flag("parallel_attn"):
        if fields.flag("new_decoder_architecture"):
            raise fields.error("parallel_attn", "is not supported with new_decoder_architecture")
        return PreNorm()
    norms = fields.optional_integer("num_ln_in_parallel_attn")
    if norms not in (None, 1, 2):
        raise fields.error("num_ln_in_parallel_attn", "must be 1 or 2")
    two = fields.flag("new_decoder_architecture") and norms != 1
    if norms == 2 and not two:
        raise fields.error("num_ln_in_parallel_attn", "is not supported without new_decoder_architecture")
    return Parallel(before_feed_forward="post_attention_layernorm" if two else None)


FAMILIES = (
    Family(
        from_hf, DEFAULTS, architectures=("FalconForCausalLM",), model_types=("falcon",), aliases=ALIASES, names=NAMES
    ),
)
