"""MiniCPM: Llama with scaling factors for embeddings, the output of each sublayer, and logits; MiniCPM 3 has latent
attention."""

from __future__ import annotations

from dataclasses import replace

from llmjax.models import deepseek_v2, granite, llama
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, gated_mlp, layer_types, rms, uniform_decoder
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


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    _check_sparse_attention(fields)
    fields.require("num_experts", 0)
    depth, size = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    factors = {
        "embedding_multiplier": fields.number("scale_emb"),
        "attention_multiplier": (fields.optional_integer("head_dim") or max(size // heads, 1)) ** -0.5,
        "residual_multiplier": fields.number("scale_depth") / depth**0.5,
        "logits_scaling": size / fields.integer("dim_model_base"),
    }
    known = replace(fields, values={**fields.values, **factors}, defaults={**granite.DEFAULTS, **DEFAULTS})
    return granite.from_hf(known)


def _check_sparse_attention(fields: Fields) -> None:
    """Raises if sequences may be long enough for sparse attention over blocks of keys (InfLLM v2 in MiniCPM 4.1)."""
    sparse = fields.mapping("sparse_config")
    if not sparse:
        return
    sparse_fields = Fields(sparse, name=f"{fields.name}: sparse_config")
    sparse_fields.require("use_nope", False)
    dense = sparse_fields.integer("dense_len", minimum=2)
    if (fields.max_model_len or fields.integer("max_position_embeddings")) >= dense:
        problem = f"is not supported for sequences of {dense} tokens and more; set max_model_len to {dense - 1} or less"
        raise fields.error("sparse_config", problem)


def minicpm3_from_hf(fields: Fields) -> ModelConfig:
    """`from_hf` for MiniCPM 3."""
    depth, size = len(layer_types(fields, kinds=("full_attention",))), fields.integer("hidden_size")
    if fields.get("v_head_dim") is None:
        v_head_dim = size // fields.integer("num_attention_heads")
        fields = replace(fields, values={**fields.values, "v_head_dim": v_head_dim})
    layer = LayerSpec(
        mixer=deepseek_v2.latent_attention(fields, interleaved=False),
        feed_forward=gated_mlp(fields, bias=fields.flag("mlp_bias")),
        norm=rms(fields),
        # Null means no factor.
        residual=PreNorm(scale=(fields.optional_number("scale_depth") or depth**0.5) / depth**0.5),
    )
    return uniform_decoder(
        fields,
        layer,
        embedding_scale=fields.number("scale_emb"),
        logit_scale=(fields.optional_integer("dim_model_base") or size) / size,
    )


FAMILIES = (
    Family(from_hf, DEFAULTS, architectures=("MiniCPMForCausalLM",), model_types=("minicpm",)),
    Family(minicpm3_from_hf, DEFAULTS_3, architectures=("MiniCPM3ForCausalLM",), model_types=("minicpm3",)),
)
