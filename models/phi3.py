"""Phi 3, 3.5, 4 and 4-mini: Llama with fused tensors, LongRoPE, a window on every layer, and, in 4-mini, a part of each
head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.names import Names

# What Hugging Face's Phi3Config means by a missing key.
DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 32000,
}
NAMES = Names()  # Llama's names, except for the fused tensors


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields = replace(fields, values=_with_longrope(fields.values))
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fields.require(key, False)
    window = fields.optional_integer("sliding_window")
    kinds = all_windowed(fields, window)
    attention = attention_by_kind(fields, kinds, window=window, partial_rotary=True)
    norm, mlp = rms(fields), gated_mlp(fields)
    layers = [LayerSpec(mixer=attention[kind], feed_forward=mlp, norm=norm) for kind in kinds]
    return decoder_config(fields, layers=layers, norm=norm)


def _with_longrope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with LongRoPE under its own name: the first checkpoints with 128k tokens call it yarn."""
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, Mapping) or scaling.get("type") != "yarn" or "long_factor" not in scaling:
        return config
    return {**config, "rope_scaling": {**scaling, "type": "longrope"}}


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("Phi3ForCausalLM",), model_types=("phi3",), names=NAMES),)
