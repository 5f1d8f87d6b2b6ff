"""Qwen3.5: Qwen3-Next with separate matrices where that has fused ones, and a plain MLP in some checkpoints."""

from __future__ import annotations

from llmjax.models import qwen3_next
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, gated_mlp, softmax_experts

# What Hugging Face's Qwen3_5TextConfig means by a missing key.
DEFAULTS = {
    **{key: value for key, value in qwen3_next.DEFAULTS.items() if "expert" not in key},
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
# The same of Qwen3_5MoeTextConfig.
MOE_DEFAULTS = {
    **{key: value for key, value in qwen3_next.DEFAULTS.items() if key != "mlp_only_layers"},
    "vocab_size": 248320,
    "num_hidden_layers": 40,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    mlps = [gated_mlp(fields)] * fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    return qwen3_next.hybrid(fields, mlps, in_turn=True)


def moe_from_hf(fields: Fields) -> ModelConfig:
    """`from_hf` for Qwen3.5 with experts in all layers."""
    fields.require("mlp_only_layers", [])
    experts = softmax_experts(
        fields, inner="moe_intermediate_size", normalize=True, shared="shared_expert_intermediate_size"
    )
    feed_forwards = [experts] * fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    return qwen3_next.hybrid(fields, feed_forwards, in_turn=True)


FAMILIES = (
    Family(from_hf, DEFAULTS, architectures=("Qwen3_5ForCausalLM",), model_types=("qwen3_5_text",)),
    Family(
        moe_from_hf,
        MOE_DEFAULTS,
        architectures=("Qwen3_5MoeForCausalLM",),
        model_types=("qwen3_5_moe_text",),
    ),
)
