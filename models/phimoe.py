"""Phi-3.5-MoE: LayerNorm, biases, and a router that chooses its two experts one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    all_windowed,
    attention_by_kind,
    decoder_config,
    experts_per_token,
    layer_norm,
)
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.moe import Experts

# What Hugging Face's PhimoeConfig means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    "vocab_size": 32064,
    "intermediate_size": 6400,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "router_jitter_noise": 0.01,
    "lm_head_bias": False,
}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields = replace(fields, values=_with_one_factor(fields.values))
    fields.require("mlp_bias", False)
    window = fields.optional_integer("sliding_window")
    kinds = all_windowed(fields, window)
    attention = attention_by_kind(fields, kinds, window=window, bias="attention_bias")
    norm, experts = layer_norm(fields, "rms_norm_eps"), _experts(fields)
    layers = [LayerSpec(mixer=attention[kind], feed_forward=experts, norm=norm) for kind in kinds]
    return decoder_config(fields, layers=layers, norm=norm, head_bias=fields.flag("lm_head_bias"))


def _experts(fields: Fields) -> Experts:
    count = fields.integer("num_local_experts")
    if experts_per_token(fields, count) != 2:
        raise fields.error("num_experts_per_tok", "is not supported; this family's router takes two")
    return Experts(
        count=count,
        per_token=2,
        inner=fields.integer("intermediate_size"),
        activation=fields.choice("hidden_act", ACTIVATIONS),
        normalize=False,
        score="sparse mixer",
        margin=2 * fields.number("router_jitter_noise"),
    )


def _with_one_factor(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with one LongRoPE factor for cosines and sines; this family gives one each for short and long ones."""
    changed = dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if isinstance(rope, Mapping) and "short_mscale" in rope:
            if rope["short_mscale"] != rope.get("long_mscale"):
                raise Fields(rope, name=f"config.json: {key}").error("long_mscale", "must be short_mscale")
            kept = {name: value for name, value in rope.items() if not name.endswith("_mscale")}
            changed[key] = {**kept, "attention_factor": rope["short_mscale"]}
    return changed


FAMILIES = (
    Family(
        from_hf,
        DEFAULTS,
        architectures=("PhimoeForCausalLM", "PhiMoEForCausalLM"),
        model_types=("phimoe",),
    ),
)
