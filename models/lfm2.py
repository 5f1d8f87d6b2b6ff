"""LFM2: short convolutions, with attention every few layers, and experts in some checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    MAX_LAYERS,
    decoder_config,
    experts_per_token,
    full_attention,
    gated_mlp,
    layer_types,
)
from llmjax.models.layers.convolution import ShortConvolution
from llmjax.models.layers.layer import FeedForward, LayerSpec, Mixer
from llmjax.models.layers.moe import Experts
from llmjax.models.layers.norm import RMS
from llmjax.models.names import Names

# What Hugging Face's Lfm2Config means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rope_theta": 1e6,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "tie_word_embeddings": True,
}
MOE_DEFAULTS = {
    **DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "block_auto_adjust_ff_dim": False,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "use_expert_bias": True,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
ALIASES = {"tie_word_embeddings": ("tie_embedding",), "intermediate_size": ("block_ff_dim",)}
MOE_ALIASES = {"tie_word_embeddings": ("tie_embedding",)}
KINDS = ("conv", "full_attention")
NAMES = Names(
    modules={
        "model.embedding_norm": "model.norm",
        "model.layers.*.operator_norm": "model.layers.*.input_layernorm",
        "model.layers.*.ffn_norm": "model.layers.*.post_attention_layernorm",
        "model.layers.*.self_attn.out_proj": "model.layers.*.self_attn.o_proj",
        "model.layers.*.self_attn.q_layernorm": "model.layers.*.self_attn.q_norm",
        "model.layers.*.self_attn.k_layernorm": "model.layers.*.self_attn.k_norm",
        "model.layers.*.feed_forward.w1": "model.layers.*.mlp.gate_proj",
        "model.layers.*.feed_forward.w3": "model.layers.*.mlp.up_proj",
        "model.layers.*.feed_forward.w2": "model.layers.*.mlp.down_proj",
    }
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    count = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    full = range(count) if fields.get("full_attn_idxs") is None else fields.indices("full_attn_idxs")
    kinds = layer_types(fields, [KINDS[i in full] for i in range(count)], kinds=KINDS)
    return _lfm2(fields, kinds, [replace(gated_mlp(fields), inner=_inner(fields))] * count)


def moe_from_hf(fields: Fields) -> ModelConfig:
    """`from_hf` for LFM2 with experts after the first layers."""
    kinds = layer_types(fields, kinds=KINDS)
    dense = fields.integer("num_dense_layers", minimum=0)
    mlp, experts = gated_mlp(fields), _experts(fields)
    return _lfm2(fields, kinds, [mlp if i < dense else experts for i in range(len(kinds))])


def _lfm2(fields: Fields, kinds: Sequence[str], feed_forwards: Sequence[FeedForward]) -> ModelConfig:
    fields.require("attention_bias", False)
    fields.require("use_pos_enc", True)
    fields.require("block_use_swiglu", True)
    norm, size = RMS(fields.number("norm_eps")), fields.integer("hidden_size")
    width = fields.integer("conv_L_cache", minimum=2)
    mixers: dict[str, Mixer] = {
        "full_attention": full_attention(fields, qk_norm=norm),
        "conv": ShortConvolution(size=size, width=width, bias=fields.flag("conv_bias")),
    }
    layers = [
        LayerSpec(mixer=mixers[kind], feed_forward=each, norm=norm)
        for kind, each in zip(kinds, feed_forwards, strict=True)
    ]
    return decoder_config(fields, layers=layers, norm=norm)


def _inner(fields: Fields) -> int:
    """The size of the MLP, computed from several keys."""
    inner = fields.integer("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim"):
        return inner
    multiple, factor = fields.integer("block_multiple_of"), fields.optional_number("block_ffn_dim_multiplier")
    inner = int(2 * inner / 3)
    return inner if factor is None else -(-int(factor * inner) // multiple) * multiple


def _experts(fields: Fields) -> FeedForward:
    count = fields.integer("num_experts")
    return Experts(
        count=count,
        per_token=experts_per_token(fields, count),
        inner=fields.integer("moe_intermediate_size"),
        activation=fields.choice("hidden_act", ACTIVATIONS),
        normalize=fields.flag("norm_topk_prob"),
        score="sigmoid",
        corrected=fields.flag("use_expert_bias"),
        scaling=fields.number("routed_scaling_factor"),
        no_share=1e-6,
    )


FAMILIES = (
    Family(from_hf, DEFAULTS, architectures=("Lfm2ForCausalLM",), model_types=("lfm2",), aliases=ALIASES, names=NAMES),
    Family(
        moe_from_hf,
        MOE_DEFAULTS,
        architectures=("Lfm2MoeForCausalLM",),
        model_types=("lfm2_moe",),
        aliases=MOE_ALIASES,
        names=NAMES,
    ),
)
