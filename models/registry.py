"""Which family reads which config.json."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from llmjax.models import (
    bloom,
    deepseek_v2,
    falcon,
    gemma3,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gptj,
    llama,
    mistral,
    mixtral,
    mpt,
    opt,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    qwen3_next,
    stablelm,
    starcoder2,
)
from llmjax.models.config import ModelConfig
from llmjax.models.errors import UnsupportedModel
from llmjax.models.names import Names


class Family(Protocol):
    """Reads the config.json of one family; see ``model_config``."""

    def __call__(self, config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig: ...


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "BloomForCausalLM": bloom.from_hf,
        "DeepseekV2ForCausalLM": deepseek_v2.from_hf,
        "FalconForCausalLM": falcon.from_hf,
        "GPT2LMHeadModel": gpt2.from_hf,
        "GPTBigCodeForCausalLM": gpt_bigcode.from_hf,
        "GPTJForCausalLM": gptj.from_hf,
        "GPTNeoXForCausalLM": gpt_neox.from_hf,
        "Gemma3ForCausalLM": gemma3.from_hf,
        "LlamaForCausalLM": llama.from_hf,
        "MPTForCausalLM": mpt.from_hf,
        "MistralForCausalLM": mistral.from_hf,
        "MixtralForCausalLM": mixtral.from_hf,
        "MptForCausalLM": mpt.from_hf,
        "OPTForCausalLM": opt.from_hf,
        "Phi3ForCausalLM": phi3.from_hf,
        "PhiForCausalLM": phi.from_hf,
        "Qwen2ForCausalLM": qwen2.from_hf,
        "Qwen2MoeForCausalLM": qwen2_moe.from_hf,
        "Qwen3ForCausalLM": qwen3.from_hf,
        "Qwen3MoeForCausalLM": qwen3_moe.from_hf,
        "Qwen3NextForCausalLM": qwen3_next.from_hf,
        "StableLMEpochForCausalLM": stablelm.from_hf,
        "StableLmForCausalLM": stablelm.from_hf,
        "Starcoder2ForCausalLM": starcoder2.from_hf,
    }
)

# Of families whose checkpoints do not have the model's own names.
NAMES: Mapping[str, Names] = MappingProxyType(
    {
        "BloomForCausalLM": bloom.NAMES,
        "FalconForCausalLM": falcon.NAMES,
        "GPT2LMHeadModel": gpt2.NAMES,
        "GPTBigCodeForCausalLM": gpt_bigcode.NAMES,
        "GPTJForCausalLM": gptj.NAMES,
        "GPTNeoXForCausalLM": gpt_neox.NAMES,
        "MPTForCausalLM": mpt.NAMES,
        "MptForCausalLM": mpt.NAMES,
        "OPTForCausalLM": opt.NAMES,
        "Phi3ForCausalLM": phi3.NAMES,
        "PhiForCausalLM": phi.NAMES,
        "StableLMEpochForCausalLM": stablelm.NAMES,
        "StableLmForCausalLM": stablelm.NAMES,
        "Starcoder2ForCausalLM": starcoder2.NAMES,
    }
)

# For a config.json that names no architecture.
MODEL_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "bloom": "BloomForCausalLM",
        "deepseek_v2": "DeepseekV2ForCausalLM",
        "falcon": "FalconForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "gpt2": "GPT2LMHeadModel",
        "gpt_bigcode": "GPTBigCodeForCausalLM",
        "gpt_neox": "GPTNeoXForCausalLM",
        "gptj": "GPTJForCausalLM",
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "mpt": "MptForCausalLM",
        "opt": "OPTForCausalLM",
        "phi": "PhiForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen2_moe": "Qwen2MoeForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "qwen3_next": "Qwen3NextForCausalLM",
        "stablelm": "StableLmForCausalLM",
        "stablelm_epoch": "StableLmForCausalLM",
        "starcoder2": "Starcoder2ForCausalLM",
    }
)


def model_config(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelConfig:
    """The configuration of a model from its config.json.

    Args:
        config: the parsed file; ``architectures[0]`` decides on the family, else ``model_type``.
        max_model_len: longest sequence that will be served, in tokens; dynamic rope scaling reaches as far. None means
            ``max_position_embeddings``.

    Raises:
        UnsupportedModel: an unknown architecture, or a key whose value is wrong or not supported.
    """
    if max_model_len is not None and max_model_len < 1:
        raise UnsupportedModel(f"max_model_len = {max_model_len} must be at least 1")
    return FAMILIES[_architecture(config)](config, max_model_len=max_model_len)


def tensor_names(config: Mapping[str, Any]) -> Names | None:
    """What checkpoints of a model's family call its tensors; None: what the model does, or the family is unknown."""
    try:
        return NAMES.get(_architecture(config))
    except UnsupportedModel:
        return None


def _architecture(config: Mapping[str, Any]) -> str:
    named, model_type = config.get("architectures"), config.get("model_type")
    if named:
        architecture = named[0] if isinstance(named, list | tuple) else named
        problem = f"architecture {architecture!r} is not supported; supported are {', '.join(sorted(FAMILIES))}"
    else:
        architecture = MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
        problem = f"model_type {model_type!r} is not supported; supported are {', '.join(sorted(MODEL_TYPES))}"
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise UnsupportedModel(f"config.json: {problem}")
    return architecture
