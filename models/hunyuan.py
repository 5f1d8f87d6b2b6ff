"""Hunyuan 1: Llama with QK norm after the rotation and a rope base scaled by a factor; in some checkpoints with experts
and a shared expert in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    full_attention,
    gated_mlp,
    rms,
    softmax_experts,
    uniform_decoder,
)
from llmjax.models.layers.layer import FeedForward, LayerSpec
from llmjax.models.layers.moe import SharedExpert
from llmjax.models.names import Names

# What Hugging Face's HunYuanDenseV1Config means by a missing key.
DEFAULTS = {**llama.DEFAULTS, "vocab_size": 290943, "rms_norm_eps": 1e-5, "use_qk_norm": True}
# The same of HunYuanMoEV1Config.
MOE_DEFAULTS = {**DEFAULTS, "num_experts": 1, "num_experts_per_tok": 1}
MOE_ALIASES = {"num_experts_per_tok": ("moe_topk",)}
NAMES = Names(
    modules={
        "model.layers.*.mlp.gate.wg": "model.layers.*.mlp.gate",
        "model.layers.*.self_attn.query_layernorm": "model.layers.*.self_attn.q_norm",
        "model.layers.*.self_attn.key_layernorm": "model.layers.*.self_attn.k_norm",
    }
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields = replace(fields, values=_with_alpha(fields.values))
    return _hunyuan(fields, gated_mlp(fields))


def moe_from_hf(fields: Fields) -> ModelConfig:
    """`from_hf` for Hunyuan with experts."""
    config = fields.values
    same = {key: _in_all_layers(config, key) for key in ("num_experts", "moe_topk") if key in config}
    fields = replace(fields, values=_with_alpha({**config, **same}))
    inner = fields.integer("intermediate_size")
    for key, plain in {"moe_layer_num_skipped": 0, "norm_topk_prob": True, "group_limited_greedy": False}.items():
        fields.require(key, plain)
    for key, neutral in {"moe_intermediate_size": inner, "num_shared_expert": 1}.items():
        Fields({key: _in_all_layers(config, key)}, name=fields.name).require(key, neutral)
    experts = softmax_experts(fields, inner="intermediate_size", normalize=True)
    return _hunyuan(fields, replace(experts, shared=SharedExpert(inner=inner, name="shared_mlp", gated=False)))


def _in_all_layers(config: Mapping[str, Any], key: str) -> Any:
    """The value of a key; a list with the same number for each layer becomes that number, other lists stay."""
    value = config.get(key)
    if isinstance(value, list | tuple) and value and all(one == value[0] for one in value):
        return value[0]
    return value


def _hunyuan(fields: Fields, feed_forward: FeedForward) -> ModelConfig:
    fields.require("use_qk_norm", True)
    fields.require("use_cla", False)
    fields.require("mlp_bias", False)
    norm = rms(fields)
    attention = full_attention(fields, bias="attention_bias", qk_norm=norm, qk_norm_first=False)
    return uniform_decoder(fields, LayerSpec(mixer=attention, feed_forward=feed_forward, norm=norm))


def _with_alpha(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with a type of its own for the scaling by alpha, which files call dynamic like NTK scaling."""
    changed = dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        scaling = config.get(key)
        if not isinstance(scaling, Mapping) or not scaling.get("alpha"):
            continue
        if scaling.get("rope_type", scaling.get("type")) == "dynamic":
            changed[key] = {**scaling, "type": "ntk_alpha", "rope_type": "ntk_alpha"}
    return changed


FAMILIES = (
    Family(
        from_hf, DEFAULTS, architectures=("HunYuanDenseV1ForCausalLM",), model_types=("hunyuan_v1_dense",), names=NAMES
    ),
    Family(
        moe_from_hf,
        MOE_DEFAULTS,
        architectures=("HunYuanMoEV1ForCausalLM",),
        model_types=("hunyuan_v1_moe",),
        aliases=MOE_ALIASES,
        names=NAMES,
    ),
)
