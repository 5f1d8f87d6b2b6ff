"""Moondream 2's text half: Phi 1.5 under other names."""

from __future__ import annotations

from llmjax.models import phi
from llmjax.models.family import Family
from llmjax.models.names import Names

# What TextConfig, which checkpoints came with, means by a missing key, under its names.
DEFAULTS = {**phi.DEFAULTS, "bos_token_id": None, "eos_token_id": None}
ALIASES = {
    "hidden_size": ("dim",),
    "intermediate_size": ("ff_dim",),
    "num_hidden_layers": ("n_layers",),
    "num_attention_heads": ("n_heads",),
    "num_key_value_heads": ("n_kv_heads",),
    "max_position_embeddings": ("max_context",),
}
NAMES = Names(
    prefix="model.text.",
    modules={
        "wte": "model.embed_tokens",
        "blocks.*.ln": "model.layers.*.input_layernorm",
        "blocks.*.attn.qkv": "model.layers.*.self_attn.qkv_proj",
        "blocks.*.attn.proj": "model.layers.*.self_attn.o_proj",
        "blocks.*.mlp.fc1": "model.layers.*.mlp.up_proj",
        "blocks.*.mlp.fc2": "model.layers.*.mlp.down_proj",
        "post_ln": "model.norm",
        "lm_head": "lm_head",
    },
)
FAMILIES = (Family(phi.from_hf, DEFAULTS, architectures=("MoondreamForCausalLM",), aliases=ALIASES, names=NAMES),)
