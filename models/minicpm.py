"""MiniCPM 1, 2 and 4: Llama with factors for embeddings, what each half adds, and logits, which follow from sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models import granite, llama
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, gated_mlp

# What MiniCPMConfig, which came with the checkpoints, means by a missing key.
DEFAULTS = {**llama.DEFAULTS, "tie_word_embeddings": True, "scale_emb": 1, "dim_model_base": 1, "scale_depth": 1}


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(config, DEFAULTS)
    fields.require("sparse_config")
    fields.require("num_experts", 0)
    depth, size = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    factors = {
        "embedding_multiplier": fields.number("scale_emb"),
        "attention_multiplier": (fields.optional_integer("head_dim") or max(size // heads, 1)) ** -0.5,
        "residual_multiplier": fields.number("scale_depth") / depth**0.5,
        "logits_scaling": size / fields.integer("dim_model_base"),
    }
    known = Fields({**config, **factors}, {**granite.DEFAULTS, **DEFAULTS})
    mlp = gated_mlp(known, bias=known.flag("mlp_bias"))
    return granite.granite_config(known, mlp, architecture="MiniCPMForCausalLM", max_model_len=max_model_len)
