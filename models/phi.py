"""Phi 1, 1.5 and 2: parallel attention and MLP without a gate after one LayerNorm, a part of each head rotated."""

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
from llmjax.models.layers.residual import Parallel
from llmjax.models.names import Names

# What Hugging Face's PhiConfig means by a missing key.
DEFAULTS = {
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "qk_layernorm": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NAMES = Names(
    modules={
        "model.final_layernorm": "model.norm",
        "model.layers.*.self_attn.dense": "model.layers.*.self_attn.o_proj",
        "model.layers.*.self_attn.q_layernorm": "model.layers.*.self_attn.q_norm",
        "model.layers.*.self_attn.k_layernorm": "model.layers.*.self_attn.k_norm",
        "model.layers.*.mlp.fc1": "model.layers.*.mlp.up_proj",
        "model.layers.*.mlp.fc2": "model.layers.*.mlp.down_proj",
    }
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("tie_word_embeddings", False)  # the head has a bias
    norm = layer_norm(fields)
    qk_norm = norm if fields.flag("qk_layernorm") else None
    attention = full_attention(fields, partial_rotary=True, qkv_bias=True, o_bias=True, qk_norm=qk_norm)
    layer = LayerSpec(mixer=attention, feed_forward=mlp(fields), norm=norm, residual=Parallel())
    return uniform_decoder(fields, layer, head_bias=True)


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("PhiForCausalLM",), model_types=("phi",), names=NAMES),)
