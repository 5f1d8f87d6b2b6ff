"""Qwen 1.5 and 2 with experts: Qwen 2 with a router and a gated shared expert."""

from __future__ import annotations

from llmjax.models import qwen2
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    MAX_LAYERS,
    attention_by_kind,
    decoder_config,
    gated_mlp,
    layer_types,
    rms,
    softmax_experts,
)
from llmjax.models.layers.layer import FeedForward, LayerSpec
from llmjax.models.layers.moe import Experts

# What Hugging Face's Qwen2MoeConfig means by a missing key.
DEFAULTS = {
    **qwen2.DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "qkv_bias": True,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "norm_topk_prob": False,
    "mlp_only_layers": (),
}


def feed_forwards(fields: Fields, experts: Experts) -> tuple[FeedForward, ...]:
    """Experts on every ``decoder_sparse_step``-th layer that is not one of ``mlp_only_layers``; else a plain MLP."""
    layers = range(fields.integer("num_hidden_layers", maximum=MAX_LAYERS))
    step, dense, mlp = fields.integer("decoder_sparse_step"), fields.indices("mlp_only_layers"), gated_mlp(fields)
    return tuple(mlp if i in dense or (i + 1) % step else experts for i in layers)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("mlp_bias", False)
    count, window = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), qwen2.window_of(fields)
    # Hugging Face puts windows on every second of the lower layers, unlike in Qwen 2.
    windowed = 0 if window is None else fields.integer("max_window_layers", minimum=0)
    default = ["sliding_attention" if i < windowed and i % 2 == 0 else "full_attention" for i in range(count)]
    kinds, norm = layer_types(fields, default), rms(fields)
    attention = attention_by_kind(fields, kinds, window=window, qkv_bias=fields.flag("qkv_bias"))
    experts = softmax_experts(
        fields,
        inner="moe_intermediate_size",
        normalize=fields.flag("norm_topk_prob"),
        shared="shared_expert_intermediate_size",
    )
    layers = [
        LayerSpec(mixer=attention[kind], feed_forward=each, norm=norm)
        for kind, each in zip(kinds, feed_forwards(fields, experts), strict=True)
    ]
    return decoder_config(fields, layers=layers, norm=norm)


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("Qwen2MoeForCausalLM",), model_types=("qwen2_moe",)),)
