"""Qwen3-Next: gated delta nets, gated attention with partial rotation every few layers, and experts."""

from __future__ import annotations

from collections.abc import Sequence

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models import qwen2_moe, qwen3_moe
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    MAX_LAYERS,
    decoder_config,
    full_attention,
    layer_types,
    rms,
    softmax_experts,
)
from llmjax.models.layers.gated_delta import GatedDelta
from llmjax.models.layers.layer import FeedForward, LayerSpec, Mixer
from llmjax.models.layers.norm import RMS

# What Hugging Face's Qwen3NextConfig means by a missing key.
DEFAULTS = {
    **qwen3_moe.DEFAULTS,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
    "linear_in_turn": False,  # not a key of Hugging Face's: GGUF files have a matrix for each part
}
KINDS = ("full_attention", "linear_attention")


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    experts = softmax_experts(
        fields,
        inner="moe_intermediate_size",
        normalize=fields.flag("norm_topk_prob"),
        shared="shared_expert_intermediate_size",
    )
    feed_forwards = qwen2_moe.feed_forwards(fields, experts)
    return hybrid(fields, feed_forwards, in_turn=fields.flag("linear_in_turn"))


def hybrid(fields: Fields, feed_forwards: Sequence[FeedForward], *, in_turn: bool) -> ModelConfig:
    """Gated delta nets and gated attention, each before one of ``feed_forwards``; ``in_turn``: see ``GatedDelta``."""
    fields.require("attn_output_gate", True)
    fields.require("mlp_bias", False)
    fields.require("use_sliding_window", False)
    count, interval = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), fields.integer("full_attention_interval")
    default = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
    kinds, norm = layer_types(fields, default, kinds=KINDS), rms(fields, plus_one=True)
    attention = full_attention(fields, partial_rotary=True, bias="attention_bias", qk_norm=norm, gated=True)
    mixers: dict[str, Mixer] = {
        "linear_attention": _delta_net(fields, in_turn=in_turn),
        "full_attention": attention,
    }
    layers = [
        LayerSpec(mixer=mixers[kind], feed_forward=each, norm=norm)
        for kind, each in zip(kinds, feed_forwards, strict=True)
    ]
    return decoder_config(fields, layers=layers, norm=norm)


def _delta_net(fields: Fields, *, in_turn: bool) -> GatedDelta:
    key_heads, value_heads = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    if value_heads % key_heads:
        raise fields.error("linear_num_value_heads", f"is not divisible by linear_num_key_heads = {key_heads}")
    return GatedDelta(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        width=fields.integer("linear_conv_kernel_dim", minimum=2),
        activation=fields.choice("hidden_act", ACTIVATIONS),
        norm=RMS(fields.number("rms_norm_eps")),
        in_turn=in_turn,
    )


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("Qwen3NextForCausalLM",), model_types=("qwen3_next",)),)
