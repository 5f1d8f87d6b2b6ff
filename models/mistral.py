"""Mistral: Llama with a sliding window on every layer, unless config.json switches it off; and Ministral 3, which
scales queries after the original context length."""

from __future__ import annotations

from dataclasses import replace

from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    all_windowed,
    attention_by_kind,
    decoder_config,
    gated_mlp,
    rms,
)
from llmjax.models.layers.attention import Attention
from llmjax.models.layers.chunks import Sharpening
from llmjax.models.layers.layer import FeedForward, LayerSpec

# What Hugging Face's MistralConfig means by a missing key; sliding_window: null is not a missing key.
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# What Hugging Face's Ministral3Config means by a missing key.
MINISTRAL3_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 131072,
    "num_hidden_layers": 34,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
SHARPENS = "llama_4_scaling_beta"


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    return mistral_config(fields, gated_mlp(fields))


def ministral3_from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``; queries are scaled by how often the original length goes into their positions."""
    config = fields.values
    key = "rope_parameters" if fields.get("rope_parameters") and "rope_scaling" not in config else "rope_scaling"
    rope = Fields(fields.mapping(key), name=f"{fields.name}: {key}")
    left = {name: value for name, value in rope.values.items() if name not in (SHARPENS, "max_position_embeddings")}
    own = {"rope_parameters": None, **config, key: left}
    model = mistral_config(replace(fields, values=own), gated_mlp(fields))
    scale = rope.optional_number(SHARPENS)
    floor = rope.optional_integer("original_max_position_embeddings") or fields.integer("max_position_embeddings")
    if scale is None or (fields.max_model_len or model.max_position) <= floor:
        return model
    sharpening = Sharpening(floor, scale, ahead=0)
    return replace(model, layers=tuple(_sharpened(layer, sharpening) for layer in model.layers))


def _sharpened(layer: LayerSpec, by: Sharpening) -> LayerSpec:
    assert isinstance(layer.mixer, Attention)
    return replace(layer, mixer=replace(layer.mixer, sharpened=by))


def mistral_config(fields: Fields, feed_forward: FeedForward) -> ModelConfig:
    """A model with a window in all layers or in none, and the same feed-forward sublayer in all."""
    fields.require("attention_bias", False)
    fields.require("mlp_bias", False)
    window = fields.optional_integer("sliding_window")
    kinds = all_windowed(fields, window)
    attention, norm = attention_by_kind(fields, kinds, window=window), rms(fields)
    layers = [LayerSpec(mixer=attention[kind], feed_forward=feed_forward, norm=norm) for kind in kinds]
    return decoder_config(fields, layers=layers, norm=norm)


FAMILIES = (
    Family(
        from_hf,
        DEFAULTS,
        architectures=("MistralForCausalLM", "MinistralForCausalLM"),
        model_types=("ministral", "mistral"),
    ),
    Family(
        ministral3_from_hf, MINISTRAL3_DEFAULTS, architectures=("Ministral3ForCausalLM",), model_types=("ministral3",)
    ),
)
