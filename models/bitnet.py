"""BitNet b1.58: Llama with a norm before the last projection of each sublayer, and weights of -1, 0 and 1."""

from __future__ import annotations

from dataclasses import replace

from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    full_attention,
    gated_mlp,
    rms,
    uniform_decoder,
)
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.names import Names

# What Hugging Face's BitNetConfig means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    "vocab_size": 128256,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 30,
    "num_attention_heads": 20,
    "num_key_value_heads": 5,
    "hidden_act": "relu2",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
NAMES = Names(
    modules={
        "model.layers.*.self_attn.attn_sub_norm": "model.layers.*.self_attn.o_norm",
        "model.layers.*.mlp.ffn_sub_norm": "model.layers.*.mlp.down_norm",
    }
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("mlp_bias", False)
    norm = rms(fields)
    attention = full_attention(fields, bias="attention_bias", o_norm=norm)
    feed_forward = replace(gated_mlp(fields), down_norm=norm)
    return uniform_decoder(fields, LayerSpec(mixer=attention, feed_forward=feed_forward, norm=norm))


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("BitNetForCausalLM",), model_types=("bitnet",), names=NAMES),)
