"""Apertus: Llama with norms of heads, and MLPs without a gate whose activation is learned in each layer."""

from __future__ import annotations

from dataclasses import replace

from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import full_attention, rms, uniform_decoder
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.mlp import MLP, XIELU
from llmjax.models.names import Names

# What Hugging Face's ApertusConfig means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    "vocab_size": 131072,
    "intermediate_size": 14336,
    "hidden_act": XIELU,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 12_000_000.0,
}
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
NAMES = Names(
    modules={
        "model.layers.*.attention_layernorm": "model.layers.*.input_layernorm",
        "model.layers.*.feedforward_layernorm": "model.layers.*.post_attention_layernorm",
    }
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    if "rope_parameters" not in fields.values:
        fields = replace(fields, defaults={**DEFAULTS, "rope_scaling": ROPE})
    fields.require("mlp_bias", False)
    norm, activation = rms(fields), fields.choice("hidden_act", (XIELU,))
    return uniform_decoder(
        fields,
        LayerSpec(
            mixer=full_attention(fields, bias="attention_bias", qk_norm=norm),
            feed_forward=MLP(inner=fields.integer("intermediate_size"), activation=activation, bias=False),
            norm=norm,
        ),
    )


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("ApertusForCausalLM",), model_types=("apertus",), names=NAMES),)
