"""MPT: ALiBi, LayerNorm without a bias, and an MLP without a gate; entries of q, k and v may be clipped."""

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
from llmjax.models.names import Names

# What Hugging Face's MptConfig means by a missing key.
DEFAULTS = {
    "vocab_size": 50368,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "expansion_ratio": 4,
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
ALIASES = {
    "hidden_size": ("d_model",),
    "num_hidden_layers": ("n_layers",),
    "num_attention_heads": ("n_heads",),
    "max_position_embeddings": ("max_seq_len",),
}
NAMES = Names(
    prefix="transformer.",
    modules={
        "wte": "model.embed_tokens",
        "norm_f": "model.norm",
        "blocks.*.norm_1": "model.layers.*.input_layernorm",
        "blocks.*.norm_2": "model.layers.*.post_attention_layernorm",
        "blocks.*.attn.Wqkv": "model.layers.*.self_attn.qkv_proj",
        "blocks.*.attn.out_proj": "model.layers.*.self_attn.o_proj",
        "blocks.*.ffn.up_proj": "model.layers.*.mlp.up_proj",
        "blocks.*.ffn.down_proj": "model.layers.*.mlp.down_proj",
    },
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("no_bias", True)
    fields.require("norm_type", "low_precision_layernorm", "layernorm")
    fields.require("logit_scale")
    fields.require("embedding_fraction", 1, 1.0)
    fields.require("use_norm_bias", False)
    ffn = Fields(fields.mapping("ffn_config"), name=f"{fields.name}: ffn_config")
    ffn.require("ffn_type", "mptmlp")
    ffn.require("ffn_act_fn", {"name": "gelu"}, {"name": "gelu", "approximate": "none"})
    heads = fields.integer("num_attention_heads")
    fields.require("num_key_value_heads", heads)
    attn = Fields(fields.mapping("attn_config"), {"alibi_bias_max": 8}, name=f"{fields.name}: attn_config")
    attn.require("attn_type", "multihead_attention")
    attn.require("alibi", True)
    attn.require("kv_n_heads", heads)
    for key in ("prefix_lm", "qk_ln", "qk_gn", "rope", "attn_uses_sequence_id"):
        attn.require(key, False)
    attn.require("sliding_window_size", -1)
    attention = full_attention(
        fields,
        rotary=False,
        # Hugging Face's class always uses 8; StoryWriter was trained with 16.
        slopes=alibi_slopes(heads, largest=attn.number("alibi_bias_max")),
        clip=attn.optional_number("clip_qkv"),
        scale=attn.optional_number("softmax_scale") or max(fields.integer("hidden_size") // heads, 1) ** -0.5,
    )
    inner = fields.integer("expansion_ratio", maximum=1024) * fields.integer("hidden_size")
    mlp, norm = MLP(inner=inner, activation="gelu", bias=False), layer_norm(fields, "layer_norm_epsilon", bias=False)
    return uniform_decoder(fields, LayerSpec(mixer=attention, feed_forward=mlp, norm=norm))


FAMILIES = (
    Family(
        from_hf,
        DEFAULTS,
        architectures=("MptForCausalLM", "MPTForCausalLM"),
        model_types=("mpt",),
        aliases=ALIASES,
        names=NAMES,
    ),
)
