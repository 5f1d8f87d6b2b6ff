"""GPT-2: learned positions, LayerNorm and an MLP without a gate; files store matrices transposed."""

from __future__ import annotations

from dataclasses import replace

from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import decoder_config, full_attention, layer_norm, layer_types, mlp
from llmjax.models.layers.embedding import LearnedPositions
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.names import Names

# What Hugging Face's GPT2Config means by a missing key.
DEFAULTS = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "activation_function": "gelu_new",
    "max_position_embeddings": 1024,
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
ALIASES = {
    "hidden_size": ("n_embd",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("n_positions",),
}
MODULES = {
    "wte": "model.embed_tokens",
    "wpe": "model.embed_positions",
    "ln_f": "model.norm",
    "h.*.ln_1": "model.layers.*.input_layernorm",
    "h.*.ln_2": "model.layers.*.post_attention_layernorm",
    "h.*.attn.c_attn": "model.layers.*.self_attn.qkv_proj",
    "h.*.attn.c_proj": "model.layers.*.self_attn.o_proj",
    "h.*.mlp.c_fc": "model.layers.*.mlp.up_proj",
    "h.*.mlp.c_proj": "model.layers.*.mlp.down_proj",
}
NAMES = Names(prefix="transformer.", modules=MODULES, transposed=(".c_attn", ".c_proj", ".c_fc"))


def inner_size(fields: Fields) -> int:
    """The intermediate size of the MLP."""
    return fields.optional_integer("n_inner") or 4 * fields.integer("hidden_size")


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("num_key_value_heads", fields.integer("num_attention_heads"))
    return gpt2_config(fields, kv_heads=fields.integer("num_attention_heads"))


def gpt2_config(fields: Fields, *, kv_heads: int) -> ModelConfig:
    """A model of GPT-2's kind; its layers differ at most in the scale of their attention logits."""
    fields.require("add_cross_attention", False)
    count, norm = len(layer_types(fields, kinds=("full_attention",))), layer_norm(fields, "layer_norm_epsilon")
    feed_forward = mlp(fields, inner=inner_size(fields), activation="activation_function")
    size = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    scale = size**-0.5 if fields.flag("scale_attn_weights") else 1.0
    by_depth = fields.flag("scale_attn_by_inverse_layer_idx")
    attention = full_attention(fields, rotary=False, kv_heads=kv_heads, qkv_bias=True, o_bias=True)
    layers = [
        LayerSpec(
            mixer=replace(attention, scale=scale / (index + 1) if by_depth else scale),
            feed_forward=feed_forward,
            norm=norm,
        )
        for index in range(count)
    ]
    positions = LearnedPositions(count=fields.integer("max_position_embeddings"))
    return decoder_config(fields, layers=layers, norm=norm, positions=positions)


FAMILIES = (
    Family(from_hf, DEFAULTS, architectures=("GPT2LMHeadModel",), model_types=("gpt2",), aliases=ALIASES, names=NAMES),
)
