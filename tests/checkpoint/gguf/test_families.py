"""Golden checkpoints written as GGUF the way llama.cpp's converter does, with the names of the gguf package, are the
same models: equal configurations and, value by value, equal weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llmjax.checkpoint import Checkpoint, open_checkpoint
from llmjax.checkpoint.safetensors import stored_tensors
from llmjax.models import ModelConfig
from tests.checkpoint.gguf.test_model import write

GOLDEN = Path(__file__).parents[2] / "models" / "golden"
F32 = np.dtype(np.float32)
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Conversion:
    """What the converter does to a family.

    Attributes:
        arch: of the gguf package.
        keys: those of the architecture, of a config.json.
        changed: a tensor by its name in the source as it is stored.
        differences: of the configuration that GGUF has no key for.
    """

    arch: gguf.MODEL_ARCH
    keys: Callable[[Config], dict[str, Any]]
    changed: Callable[[str, np.ndarray, Config], np.ndarray] = lambda name, values, config: values
    extra: Callable[[Config], dict[str, np.ndarray]] = lambda config: {}
    differences: dict[str, Any] = field(default_factory=dict)


def common(config: Config) -> dict[str, Any]:
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config.get("num_key_value_heads", config["num_attention_heads"]),
    }


def starcoder2(config: Config) -> dict[str, Any]:
    return common(config) | {
        "attention.layer_norm_epsilon": config.get("norm_epsilon", 1e-5),
        "rope.freq_base": config.get("rope_theta", 1e4),
        **({"attention.sliding_window": config["sliding_window"]} if config["sliding_window"] else {}),
    }


def rotary_size(config: Config, default: float) -> int:
    size = config["hidden_size"] // config["num_attention_heads"]
    return int(size * config.get("partial_rotary_factor", default))


def phi2(config: Config) -> dict[str, Any]:
    return common(config) | {"attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": rotary_size(config, 0.5)}


def phi3(config: Config) -> dict[str, Any]:
    original, longest = config["original_max_position_embeddings"], config["max_position_embeddings"]
    return common(config) | {
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": config["sliding_window"] or 0,
        "rope.dimension_count": rotary_size(config, 1.0),
        "rope.freq_base": 10000.0,
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(longest / original) / np.log(original))),
    }


def phi3_factors(config: Config) -> dict[str, np.ndarray]:
    scaling = config["rope_scaling"]
    return {f"rope_factors_{kind}.weight": np.array(scaling[f"{kind}_factor"], F32) for kind in ("long", "short")}


PHI3 = Conversion(gguf.MODEL_ARCH.PHI3, phi3, extra=phi3_factors)
CONVERSIONS = {
    "starcoder2": Conversion(gguf.MODEL_ARCH.STARCODER2, starcoder2),
    "starcoder2-plain": Conversion(gguf.MODEL_ARCH.STARCODER2, starcoder2),
    "phi": Conversion(gguf.MODEL_ARCH.PHI2, phi2),
    "phi3": PHI3,
    "phi4-mini": PHI3,
}


def converted(name: str, path: Path) -> Checkpoint:
    folder, conversion = GOLDEN / name, CONVERSIONS[name]
    config = open_checkpoint(folder).config
    keys = conversion.keys(config)
    names = gguf.get_tensor_name_map(conversion.arch, keys["block_count"])
    tensors = conversion.extra(config)
    for stored, tensor in stored_tensors(folder).items():
        new = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        assert new is not None, stored
        tensors[new] = np.ascontiguousarray(conversion.changed(stored, tensor.read(F32), config))
    return open_checkpoint(write(path / f"{name}.gguf", gguf.MODEL_ARCH_NAMES[conversion.arch], keys, tensors))


def comparable(model: ModelConfig, **differences: Any) -> ModelConfig:
    """Without what GGUF keeps among the tokenizer's keys, and the type of the original weights."""
    return replace(model, dtype=None, bos_token_id=None, eos_token_ids=(), **differences)


@pytest.mark.parametrize("name", CONVERSIONS)
def test_gguf_of_a_family(name: str, tmp_path: Path) -> None:
    source, found = open_checkpoint(GOLDEN / name), converted(name, tmp_path)
    differences = CONVERSIONS[name].differences
    expected, got = comparable(source.model_config(), **differences), comparable(found.model_config(), **differences)
    assert _rounded(got) == _rounded(expected)
    assert found.tensors.keys() == source.tensors.keys()
    for key, tensor in source.tensors.items():
        np.testing.assert_array_equal(found.tensors[key].read(F32), tensor.read(F32), err_msg=key)


def _rounded(model: ModelConfig) -> ModelConfig:
    """With rope's frequencies and factors rounded to f32 and a little more: GGUF keeps f32."""

    def rope(own: Any) -> Any:
        if own is None:
            return None
        by = own.by_length
        if by is not None:
            by = replace(by, inv_freq=tuple(float(f"{x:.5e}") for x in by.inv_freq))
        inv_freq = tuple(float(f"{x:.5e}") for x in own.inv_freq)
        return replace(own, inv_freq=inv_freq, attention_factor=float(f"{own.attention_factor:.5e}"), by_length=by)

    layers = tuple(replace(one, mixer=replace(one.mixer, rope=rope(one.mixer.rope))) for one in model.layers)
    return replace(model, layers=layers)
