"""StarCoder 2: LayerNorm, an MLP without a gate, biases everywhere, grouped heads, and a window on every layer."""

from __future__ import annotations

from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    all_windowed,
    attention_by_kind,
    decoder_config,
    layer_norm,
    mlp,
)
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.names import Names

# What Hugging Face's Starcoder2Config means by a missing key.
DEFAULTS = {
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "use_bias": True,
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
NAMES = Names(
    modules={
        "model.layers.*.mlp.c_fc": "model.layers.*.mlp.up_proj",
        "model.layers.*.mlp.c_proj": "model.layers.*.mlp.down_proj",
    }
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("mlp_type", "default")
    fields.require("norm_type", "layer_norm")
    window, bias = fields.optional_integer("sliding_window"), fields.flag("use_bias")
    kinds = all_windowed(fields, window)
    attention = attention_by_kind(fields, kinds, window=window, bias="use_bias")
    norm, feed_forward = layer_norm(fields, "norm_epsilon"), mlp(fields, bias=bias)
    layers = [LayerSpec(mixer=attention[kind], feed_forward=feed_forward, norm=norm) for kind in kinds]
    return decoder_config(fields, layers=layers, norm=norm)


FAMILIES = (
    Family(from_hf, DEFAULTS, architectures=("Starcoder2ForCausalLM",), model_types=("starcoder2",), names=NAMES),
)
