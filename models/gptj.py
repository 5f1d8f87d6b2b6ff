"""GPT-J: parallel sublayers after one norm, and the first entries of each head rotated in neighboring pairs."""

from __future__ import annotations

from dataclasses import replace

from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.gpt2 import ALIASES, inner_size
from llmjax.models.hf_config import (
    full_attention,
    layer_norm,
    mlp,
    uniform_decoder,
)
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.residual import Parallel
from llmjax.models.names import Names

# What Hugging Face's GPTJConfig means by a missing key.
DEFAULTS = {
    "vocab_size": 50400,
    "hidden_size": 4096,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "rotary_dim": 64,
    "activation_function": "gelu_new",
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
NAMES = Names(
    prefix="transformer.",
    modules={
        "wte": "model.embed_tokens",
        "ln_f": "model.norm",
        "h.*.ln_1": "model.layers.*.input_layernorm",
        "h.*.attn.q_proj": "model.layers.*.self_attn.q_proj",
        "h.*.attn.k_proj": "model.layers.*.self_attn.k_proj",
        "h.*.attn.v_proj": "model.layers.*.self_attn.v_proj",
        "h.*.attn.out_proj": "model.layers.*.self_attn.o_proj",
        "h.*.mlp.fc_in": "model.layers.*.mlp.up_proj",
        "h.*.mlp.fc_out": "model.layers.*.mlp.down_proj",
    },
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("tie_word_embeddings", False)  # the head has a bias
    fields.require("rotary", True)
    heads = fields.integer("num_attention_heads")
    fields.require("num_key_value_heads", heads)
    # The part of a head that is rotated.
    rotated = fields.integer("rotary_dim") * heads / fields.integer("hidden_size")
    fields = replace(fields, defaults={**DEFAULTS, "partial_rotary_factor": rotated})
    layer = LayerSpec(
        mixer=full_attention(fields, partial_rotary=True, interleaved=True),
        feed_forward=mlp(fields, inner=inner_size(fields), activation="activation_function"),
        norm=layer_norm(fields, "layer_norm_epsilon"),
        residual=Parallel(),
    )
    return uniform_decoder(fields, layer, head_bias=True)


FAMILIES = (
    Family(from_hf, DEFAULTS, architectures=("GPTJForCausalLM",), model_types=("gptj",), aliases=ALIASES, names=NAMES),
)
