"""MiniCPM: Llama with factors for embeddings, what each half adds, and logits, which follow from sizes; MiniCPM 3 has
latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmjax.models import deepseek_v2, granite, llama
from llmjax.models.config import ModelConfig
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, decoder_config, gated_mlp, layer_types, rms
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.residual import PreNorm

# What MiniCPMConfig, which came with the checkpoints, means by a missing key.
DEFAULTS = {**llama.DEFAULTS, "tie_word_embeddings": True, "scale_emb": 1, "dim_model_base": 1, "scale_depth": 1}
# What Hugging Face's MiniCPM3Config means by a missing key.
DEFAULTS_3 = {
    **llama.DEFAULTS,
    "vocab_size": 73448,
    "hidden_size": 2560,
    "intermediate_size": 6400,
    "num_hidden_layers": 62,
    "num_attention_heads": 40,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "q_lora_rank": 768,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}


def from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """See ``llmjax.models.model_config``."""
    fields = Fields(config, DEFAULTS)
    _check_sparse_attention(fields, max_model_len)
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


def _check_sparse_attention(fields: Fields, max_model_len: int | None) -> None:
    """Raises where sequences may become so long that blocks of keys are chosen (InfLLM v2 of MiniCPM 4.1)."""
    given = fields.mapping("sparse_config")
    if not given:
        return
    own = Fields(given, name=f"{fields.name}: sparse_config")
    own.require("use_nope", False)
    dense = own.integer("dense_len", minimum=2)
    if (max_model_len or fields.integer("max_position_embeddings")) >= dense:
        problem = f"is not supported for sequences of {dense} tokens and more; set max_model_len to {dense - 1} or less"
        raise fields.error("sparse_config", problem)


def minicpm3_from_hf(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """`from_hf` for MiniCPM 3."""
    fields = Fields(config, DEFAULTS_3)
    depth, size = len(layer_types(fields, kinds=("full_attention",))), fields.integer("hidden_size")
    if fields.get("v_head_dim") is None:
        fields = replace(fields, values={**config, "v_head_dim": size // fields.integer("num_attention_heads")})
    norm = rms(fields)
    layer = LayerSpec(
        mixer=deepseek_v2.latent_attention(fields, max_model_len, interleaved=False),
        feed_forward=gated_mlp(fields, bias=fields.flag("mlp_bias")),
        norm=norm,
        # Null means no factor.
        residual=PreNorm(scale=(fields.optional_number("scale_depth") or depth**0.5) / depth**0.5),
    )
    return decoder_config(
        fields,
        architecture="MiniCPM3ForCausalLM",
        layers=[layer] * depth,
        norm=norm,
        embedding_scale=fields.number("scale_emb"),
        logit_scale=(fields.optional_integer("dim_model_base") or size) / size,
    )
