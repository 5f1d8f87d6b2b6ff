"""MiniMax Text-01 and M1: lightning attention, with softmax attention every few layers, experts, and a residual stream
that is normed before each sublayer."""

from __future__ import annotations

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models import mixtral
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
from llmjax.models.layers.layer import LayerSpec, Mixer
from llmjax.models.layers.lightning import LightningAttention
from llmjax.models.layers.norm import RMS
from llmjax.models.layers.residual import NormedStream
from llmjax.models.minimax_m2 import with_rotated_part

KINDS = ("linear_attention", "full_attention")
FACTORS = ("full_attn", "linear_attn", "mlp")
# What Hugging Face's MiniMaxConfig means by a missing key.
DEFAULTS = {
    **mixtral.DEFAULTS,
    "max_position_embeddings": 131072,
    "head_dim": None,
    "attn_type_list": None,
    "postnorm": True,
    "layer_types": None,
    **{f"{part}_{factor}_factor": 1.0 for part in FACTORS for factor in ("alpha", "beta")},
}
# The names in the config that came with the checkpoints.
ALIASES = {
    f"{part}_{factor}_factor": (f"layernorm_{older}_{factor}",)
    for part, older in zip(FACTORS, ("full_attention", "linear_attention", "mlp"), strict=True)
    for factor in ("alpha", "beta")
}
EPS = 1e-6  # of the norm in lightning attention; no key of config.json says it


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    partial = fields.values.get("rotary_dim") is not None  # transformers reads no other key
    fields = with_rotated_part(fields)
    fields.require("postnorm", True)
    fields.require("shared_intermediate_size", 0)
    fields.require("sliding_window")
    count, norm = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), rms(fields)
    kinds = layer_types(fields, _kinds(fields, count), kinds=KINDS)
    attention = full_attention(fields, partial_rotary=partial)
    mixers: list[Mixer] = [
        attention
        if kind == "full_attention"
        else LightningAttention(
            heads=attention.heads,
            head_dim=attention.head_dim,
            activation=fields.choice("hidden_act", ACTIVATIONS),
            norm=RMS(EPS),
            decay=1 - i / (count - 1 + 1e-5) + 1e-5,
        )
        for i, kind in enumerate(kinds)
    ]
    residual = {kind: _residual(fields, part) for kind, part in zip(KINDS, ("linear_attn", "full_attn"), strict=True)}
    experts = softmax_experts(fields, inner="intermediate_size", normalize=True)
    layers = [
        LayerSpec(mixer=mixer, feed_forward=experts, norm=norm, residual=residual[kind])
        for mixer, kind in zip(mixers, kinds, strict=True)
    ]
    return decoder_config(fields, layers=layers, norm=norm)


def _kinds(fields: Fields, count: int) -> list[str]:
    """The kind of each layer: from the older key, with 0 for lightning attention; else alternating, softmax first."""
    if fields.get("attn_type_list") is None:
        return [KINDS[(i + 1) % 2] for i in range(count)]
    marks = fields.indices("attn_type_list")
    if len(marks) != count or any(mark > 1 for mark in marks):
        raise fields.error("attn_type_list", f"must have a 0 or a 1 for each of {count} layers")
    return [KINDS[mark] for mark in marks]


def _residual(fields: Fields, part: str) -> NormedStream:
    mixer, feed_forward = (
        (fields.number(f"{one}_alpha_factor"), fields.number(f"{one}_beta_factor")) for one in (part, "mlp")
    )
    return NormedStream(mixer=mixer, feed_forward=feed_forward)


FAMILIES = (
    Family(
        from_hf,
        DEFAULTS,
        architectures=("MiniMaxForCausalLM", "MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM"),
        model_types=("minimax", "minimax_m1", "minimax_text_01"),
        aliases=ALIASES,
    ),
)
