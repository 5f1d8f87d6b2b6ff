"""OLMoE: Llama with experts in every layer, and QK norm over all heads."""

from __future__ import annotations

from llmjax.models import olmo2
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import (
    full_attention,
    rms,
    softmax_experts,
    uniform_decoder,
)
from llmjax.models.layers.layer import LayerSpec

# What Hugging Face's OlmoeConfig means by a missing key.
DEFAULTS = {
    **olmo2.DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    fields.require("mlp_bias", False)
    norm = rms(fields)
    attention = full_attention(fields, bias="attention_bias", qk_norm=norm, qk_norm_over="all heads")
    experts = softmax_experts(fields, inner="intermediate_size", normalize=fields.flag("norm_topk_prob"))
    return uniform_decoder(fields, LayerSpec(mixer=attention, feed_forward=experts, norm=norm))


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("OlmoeForCausalLM",), model_types=("olmoe",)),)
