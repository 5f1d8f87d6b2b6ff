"""GPT-NeoX and Pythia: parallel sublayers with norms of their own, and a quarter of each head rotated."""

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
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.residual import Parallel, PreNorm
from llmjax.models.names import QKV, Names

# What Hugging Face's GPTNeoXConfig means by a missing key.
DEFAULTS = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "attention_bias": True,
    "use_parallel_residual": True,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
ALIASES = {"partial_rotary_factor": ("rotary_pct",), "rope_theta": ("rotary_emb_base",)}
NAMES = Names(
    prefix="gpt_neox.",
    modules={
        "embed_in": "model.embed_tokens",
        "embed_out": "lm_head",
        "final_layer_norm": "model.norm",
        "layers.*.input_layernorm": "model.layers.*.input_layernorm",
        "layers.*.post_attention_layernorm": "model.layers.*.post_attention_layernorm",
        "layers.*.attention.query_key_value": "model.layers.*.self_attn.qkv_proj",
        "layers.*.attention.dense": "model.layers.*.self_attn.o_proj",
        "layers.*.mlp.dense_h_to_4h": "model.layers.*.mlp.up_proj",
        "layers.*.mlp.dense_4h_to_h": "model.layers.*.mlp.down_proj",
    },
    qkv=QKV.BY_GROUP,
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("num_key_value_heads", fields.integer("num_attention_heads"))
    parallel = Parallel(before_feed_forward="post_attention_layernorm")
    layer = LayerSpec(
        mixer=full_attention(fields, partial_rotary=True, bias="attention_bias"),
        feed_forward=mlp(fields),
        norm=layer_norm(fields),
        residual=parallel if fields.flag("use_parallel_residual") else PreNorm(),
    )
    return uniform_decoder(fields, layer)


FAMILIES = (
    Family(
        from_hf,
        DEFAULTS,
        architectures=("GPTNeoXForCausalLM",),
        model_types=("gpt_neox",),
        aliases=ALIASES,
        names=NAMES,
    ),
)
