"""Mixtral: Mistral with experts in every layer; the shares of a token's experts add up to one."""

from __future__ import annotations

from llmjax.models import mistral
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import softmax_experts

# What Hugging Face's MixtralConfig means by a missing key.
DEFAULTS = {
    **mistral.DEFAULTS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    return mistral.mistral_config(fields, softmax_experts(fields, inner="intermediate_size", normalize=True))


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("MixtralForCausalLM",), model_types=("mixtral",)),)
