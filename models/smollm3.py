"""SmolLM 3: Llama without rope on every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, attention_by_kind, decoder_config, gated_mlp, layer_types, rms
from llmjax.models.layers.layer import LayerSpec

# What Hugging Face's SmolLM3Config means by a missing key.
DEFAULTS = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 2e6,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    rotated = _rotated(fields)
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window") else None
    # Hugging Face: windows are on the layers that are not rotated.
    default = ["full_attention" if window is None or turned else "sliding_attention" for turned in rotated]
    kinds, norm, mlp = layer_types(fields, default), rms(fields), gated_mlp(fields, bias=fields.flag("mlp_bias"))
    attention = attention_by_kind(fields, kinds, window=window, bias="attention_bias")
    layers = [
        LayerSpec(mixer=attention[kind] if turned else replace(attention[kind], rope=None), feed_forward=mlp, norm=norm)
        for kind, turned in zip(kinds, rotated, strict=True)
    ]
    return decoder_config(fields, layers=layers, norm=norm)


def _rotated(fields: Fields) -> list[bool]:
    """Whether each layer is rotated, which the key ``no_rope_layers`` says with a 1."""
    count, interval = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), fields.integer("no_rope_layer_interval")
    if fields.get("no_rope_layers") is None:
        return [(i + 1) % interval > 0 for i in range(count)]
    flags = fields.indices("no_rope_layers")
    if len(flags) < count or max(flags) > 1:
        raise fields.error("no_rope_layers", f"must be a list of {count} numbers, each 0 or 1")
    return [turned == 1 for turned in flags[:count]]


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("SmolLM3ForCausalLM",), model_types=("smollm3",)),)
