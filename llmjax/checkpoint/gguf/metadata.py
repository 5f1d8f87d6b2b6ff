"""Writes config.json as the keys of a GGUF file: the inverse of `model.hf_config`.

Key names: ggml's docs/gguf.md and llama.cpp's converter. Properties that no key can express are refused, so that the
file always describes the same model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from llmjax.checkpoint.gguf.architectures import ARCHITECTURES
from llmjax.checkpoint.gguf.experts import expert_metadata
from llmjax.checkpoint.gguf.names import END_KEYS, SAMPLING_KEYS
from llmjax.checkpoint.gguf.rope import DIVISORS, LONG, SHORT
from llmjax.errors import CheckpointError
from llmjax.models import Attention, ModelConfig, gemma3, llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from llmjax.models.fields import Fields
from llmjax.models.layers.rope_scaling import rope_parameters

_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "LlamaForCausalLM": llama.DEFAULTS,
        "MistralForCausalLM": mistral.DEFAULTS,
        "MixtralForCausalLM": mixtral.DEFAULTS,
        "Qwen2ForCausalLM": qwen2.DEFAULTS,
        "Qwen2MoeForCausalLM": qwen2_moe.DEFAULTS,
        "Qwen3ForCausalLM": qwen3.DEFAULTS,
        "Qwen3MoeForCausalLM": qwen3_moe.DEFAULTS,
        "Gemma3ForCausalLM": gemma3.DEFAULTS,
    }
)
_BY_CLASS = {entry.hf_class: name for name, entry in ARCHITECTURES.items() if entry.hf_class in _DEFAULTS} | {
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
}
GEMMA_PERIOD = 6  # of windowed layers, where no key says so


def architecture_name(model: ModelConfig, path: Path) -> str:
    """``general.architecture`` for a model.

    Raises:
        CheckpointError: there is none.
    """
    if model.architecture not in _BY_CLASS:
        raise CheckpointError(
            f"{path}: {model.architecture} cannot be written as GGUF; supported are {', '.join(_BY_CLASS)}"
        )
    return _BY_CLASS[model.architecture]


def attentions(model: ModelConfig) -> list[Attention]:
    """The mixer of each layer of a model that has an `architecture_name`."""
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, Attention)]
    assert len(mixers) == model.num_layers
    return mixers


def architecture_metadata(config: Mapping[str, Any], model: ModelConfig, path: Path) -> dict[str, Any]:
    """The ``<architecture>.*`` keys.

    Args:
        config: content of config.json.
        model: the model that it describes.
        path: the checkpoint, for messages.

    Raises:
        CheckpointError: the model has a property that no key can express.
    """
    name, attention = architecture_name(model, path), attentions(model)[0]
    assert model.norm is not None
    keys: dict[str, Any] = {
        "block_count": model.num_layers,
        "context_length": _integer(config, model, "max_position_embeddings"),
        "embedding_length": model.hidden_size,
        "feed_forward_length": _integer(config, model, "intermediate_size"),
        "attention.head_count": attention.heads,
        "attention.head_count_kv": attention.kv_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        "attention.layer_norm_rms_epsilon": float(model.norm.eps),
        "rope.dimension_count": model.ropes[0].rotary_dim,
        "vocab_size": model.vocab_size,
    }
    keys |= expert_metadata(model, path)
    keys |= _rope_keys(config, model, path)
    keys |= _gemma_keys(config, model) if name == "gemma3" else _window_keys(name, model, path)
    if model.final_softcap is not None:
        keys["final_logit_softcapping"] = float(model.final_softcap)
    return {f"{name}.{key}": value for key, value in keys.items()}


def rope_tensors(config: Mapping[str, Any], model: ModelConfig) -> dict[str, np.ndarray]:
    """Tensors with divisors of frequencies: f32 [rotary_dim / 2] by name; none for scalings that keys describe."""
    rope = _rope(config, model)
    if rope.get("rope_type") in ("longrope", "su"):
        return {
            name: np.array(rope.get(key), np.float32) for name, key in ((LONG, "long_factor"), (SHORT, "short_factor"))
        }
    if rope.get("rope_type") not in ("llama3", "custom"):
        return {}
    frequencies = np.array(_full_rope(model).inv_freq, np.float64)
    size = 2 * len(frequencies)
    base = rope.number("rope_theta") ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    return {DIVISORS: (base / frequencies).astype(np.float32)}


def token_metadata(model: ModelConfig, generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Special token ids and recommended sampling settings."""
    found: dict[str, Any] = {}
    if model.bos_token_id is not None:
        found["tokenizer.ggml.bos_token_id"] = model.bos_token_id
    for kind, token in zip(END_KEYS, model.eos_token_ids, strict=False):
        found[f"tokenizer.ggml.{kind}_token_id"] = token
    for key, name in SAMPLING_KEYS.items():
        if isinstance(value := generation_config.get(name), int | float):
            found[f"general.sampling.{key}"] = int(value) if key == "top_k" else float(value)
    return found


def _integer(config: Mapping[str, Any], model: ModelConfig, key: str) -> int:
    return Fields(config, _DEFAULTS[model.architecture]).integer(key)


def _rope(config: Mapping[str, Any], model: ModelConfig) -> Fields:
    """The rope keys of the layers with full attention, or of all if none has."""
    kind = "full_attention" if None in model.windows else "sliding_attention"
    return rope_parameters(Fields(config, _DEFAULTS[model.architecture]), kind)


def _full_rope(model: ModelConfig) -> Any:
    mixers = attentions(model)
    return next((mixer for mixer in mixers if mixer.window is None), mixers[0]).rope


def _rope_keys(config: Mapping[str, Any], model: ModelConfig, path: Path) -> dict[str, Any]:
    rope = _rope(config, model)
    kind = rope.get("rope_type")
    keys: dict[str, Any] = {"rope.freq_base": rope.number("rope_theta")}
    if kind in ("default", "llama3", "custom"):  # what scales these frequencies is a tensor
        return keys
    factor = rope.optional_number("factor")
    original = rope.optional_integer("original_max_position_embeddings")
    resolved = _full_rope(model).attention_factor
    if kind == "linear" and factor is not None:
        return keys | {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
    if original is not None:
        keys["rope.scaling.original_context_length"] = original
    if kind in ("longrope", "su"):
        return keys | {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": float(resolved)}
    if kind == "yarn" and factor is not None and rope.get("truncate") in (None, True):
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": factor}
        for name in ("beta_fast", "beta_slow"):
            if rope.get(name) is not None:
                keys[f"rope.scaling.yarn_{name}"] = rope.number(name)
        # Readers multiply by yarn's own factor.
        extra = resolved / (1.0 + 0.1 * math.log(max(factor, 1.0)))
        return keys if math.isclose(extra, 1.0) else keys | {"rope.scaling.attn_factor": extra}
    raise CheckpointError(f"{path}: rope scaling {kind!r} as config.json has it cannot be written as GGUF")


def _window_keys(name: str, model: ModelConfig, path: Path) -> dict[str, Any]:
    if model.windows == (None,):
        return {}
    if name != "llama" or len(model.windows) > 1:
        raise CheckpointError(f"{path}: the sliding window of {model.architecture} cannot be written as GGUF")
    return {"attention.sliding_window": model.windows[0]}


def _gemma_keys(config: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    fields = Fields(config, gemma3.DEFAULTS)
    sliding, attention = np.array([mixer.window is not None for mixer in attentions(model)]), attentions(model)[0]
    local = rope_parameters(fields, "sliding_attention", theta="rope_local_base_freq", scaled=False)
    keys: dict[str, Any] = {
        "attention.sliding_window": fields.integer("sliding_window"),
        "rope.freq_base_swa": local.number("rope_theta"),
    }
    periods = [p for p in range(1, len(sliding) + 2) if np.array_equal(sliding, np.arange(1, len(sliding) + 1) % p > 0)]
    if GEMMA_PERIOD not in periods:
        keys["attention.sliding_window_pattern"] = periods[0] if periods else sliding
    # 27B, told by its depth, scales by hidden size over heads.
    assumed = model.hidden_size // attention.heads if model.num_layers == 62 else attention.head_dim
    if not math.isclose(attention.scale, assumed**-0.5):
        keys["attention.scale"] = attention.scale
    return keys
