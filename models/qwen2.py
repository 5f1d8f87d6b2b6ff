"""Qwen 1.5, 2 and 2.5: Llama with biases on q, k and v, and an optional window on the upper layers."""

from __future__ import annotations

from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, attention_by_kind, decoder_config, gated_mlp, layer_types, rms
from llmjax.models.layers.layer import LayerSpec

# What Hugging Face's Qwen2Config means by a missing key.
DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "tie_word_embeddings": False,
}


def window_of(fields: Fields) -> int | None:
    """The window; None unless ``use_sliding_window`` is set."""
    return fields.optional_integer("sliding_window") if fields.flag("use_sliding_window") else None


def windowed_layers(fields: Fields) -> tuple[str, ...]:
    """Full attention up to ``max_window_layers``, sliding from there on."""
    count = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    full = count if window_of(fields) is None else min(count, fields.integer("max_window_layers", minimum=0))
    return layer_types(fields, ["full_attention"] * full + ["sliding_attention"] * (count - full))


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("mlp_bias", False)
    kinds, norm, mlp = windowed_layers(fields), rms(fields), gated_mlp(fields)
    attention = attention_by_kind(fields, kinds, window=window_of(fields), qkv_bias=True)
    layers = [LayerSpec(mixer=attention[kind], feed_forward=mlp, norm=norm) for kind in kinds]
    return decoder_config(fields, layers=layers, norm=norm)


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("Qwen2ForCausalLM",), model_types=("qwen2",)),)
