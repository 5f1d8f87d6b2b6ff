"""Qwen 1.5 and 2 with experts: Qwen 2 with a router, and a gated expert that every token goes through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models import qwen2
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, decoder_config, experts_config, layer_types

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


def dense_layers(fields: Fields) -> frozenset[int]:
    """The layers without experts: ``mlp_only_layers``, and all but every ``decoder_sparse_step``-th."""
    layers = range(fields.integer("num_hidden_layers", maximum=MAX_LAYERS))
    step = fields.integer("decoder_sparse_step")
    return frozenset(fields.indices("mlp_only_layers")) | {i for i in layers if (i + 1) % step}


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(config, DEFAULTS)
    fields.require("mlp_bias", False)
    count, window = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), qwen2.window_of(fields)
    # Hugging Face: every second of the lower layers, unlike Qwen 2.
    windowed = 0 if window is None else fields.integer("max_window_layers", minimum=0)
    default = ["sliding_attention" if i < windowed and i % 2 == 0 else "full_attention" for i in range(count)]
    return decoder_config(
        fields,
        architecture="Qwen2MoeForCausalLM",
        layers=layer_types(fields, default),
        window=window,
        max_model_len=max_model_len,
        qkv_bias=fields.flag("qkv_bias"),
        experts=experts_config(
            fields,
            inner="moe_intermediate_size",
            normalize=fields.flag("norm_topk_prob"),
            shared="shared_expert_intermediate_size",
        ),
        dense_layers=dense_layers(fields),
    )
