"""Calibrated scales of the KV cache, from the three places where they may be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.checkpoint import Checkpoint
from llmjax.checkpoint.kv_scales import is_kv_scale, kv_calibration
from llmjax.checkpoint.safetensors import SafetensorsTensor
from llmjax.errors import CheckpointError, ConfigError
from llmjax.models import ModelConfig, model_config

INT8, E4M3 = jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn)
LLAMA = model_config({"model_type": "llama", "num_hidden_layers": 2})
HYBRID = model_config({"model_type": "qwen3_next", "num_hidden_layers": 4})  # only the last layer has attention
LATENT = model_config({"model_type": "deepseek_v2", "num_hidden_layers": 1, "num_experts_per_tok": 2})


def checkpoint(scales: Mapping[str, Any], **config: Any) -> Checkpoint:
    """Scales by what follows ``model.layers.``."""
    arrays = {f"model.layers.{name}": np.array(value, np.float32) for name, value in scales.items()}
    tensors = {name: SafetensorsTensor(name, "F32", a.shape, a, Path("x")) for name, a in arrays.items()}
    return Checkpoint(Path("here"), config, {}, tensors)


def found(
    scales: Mapping[str, Any],
    model: ModelConfig = LLAMA,
    dtype: jnp.dtype = E4M3,
    path: Path | None = None,
    **keys: Any,
) -> list[list[list[float]]] | None:
    got = kv_calibration(checkpoint(scales, **keys), None if path is None else str(path), dtype=dtype, model=model)
    return None if got is None else got.tolist()


def test_of_tensors_by_all_their_names() -> None:
    scales = {
        "0.self_attn.k_proj.k_scale": 0.5,
        "0.self_attn.v_scale": [0.25],
        "1.self_attn.attn.k_scale": 2.0,
        "1.self_attn.v_proj.output_scale": 4.0,
    }
    assert found(scales) == [[[0.5, 0], [0.25, 0]], [[2, 0], [4, 0]]]
    both = {f"{layer}.self_attn.kv_scale": layer + 1 for layer in range(2)}
    assert found(both) == [[[1, 0]] * 2, [[2, 0]] * 2]
    assert all(is_kv_scale(f"model.layers.{name}") for name in (*scales, *both, "1.self_attn.q_scale"))
    assert not is_kv_scale("model.layers.0.self_attn.k_proj.weight_scale")


def test_layers_without_keys_and_values_have_none() -> None:
    scales = {"3.self_attn.k_scale": 0.5, "3.self_attn.v_scale": 0.25}
    assert found(scales, HYBRID) == [[[1, 0]] * 2] * 3 + [[[0.5, 0], [0.25, 0]]]
    with pytest.raises(CheckpointError, match="here: there are KV cache scales of layer 0, which keeps no keys and"):
        found({**scales, "0.self_attn.kv_scale": 1}, HYBRID)


def test_for_another_type_they_are_not_used() -> None:
    scales = {f"{layer}.self_attn.kv_scale": 1 for layer in range(2)}
    assert found({}) is None
    assert found(scales, dtype=INT8) is None
    of_integers = {"quantization_config": {"kv_cache_scheme": {"type": "int"}}}
    assert found(scales, dtype=INT8, **of_integers) == [[[1, 0]] * 2] * 2
    assert found(scales, **of_integers) is None


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"0.self_attn.kv_scale": 1}, "there are no KV cache scales of layer 1"),
        ({f"{i}.self_attn.kv_scale": 1 for i in range(3)}, "there are KV cache scales of layer 2, the model has 2"),
        ({"0.self_attn.k_scale": 1, "1.self_attn.kv_scale": 1}, "layer 0 has no v_scale, only the other one"),
        ({"0.self_attn.k_scale": 1, "0.self_attn.kv_scale": 1}, "the layer has another k_scale"),
        ({"0.self_attn.k_scale": [1, 2]}, r"has shape \[2\]; one KV cache scale a layer is supported"),
        ({"0.self_attn.k_scale": 0}, "a scale must be a positive number, not 0"),
        ({"0.self_attn.k_scale": np.inf}, "a scale must be a positive number, not inf"),
    ],
)
def test_tensors_that_are_refused(scales: Mapping[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        found(scales)


def test_latent_vectors_have_none() -> None:
    with pytest.raises(CheckpointError, match="not of latent vectors"):
        found({"0.self_attn.kv_scale": 1}, LATENT)


def of_vllm(folder: Path, scales: Mapping[str, Any], *, dtype: str = "float8_e4m3fn", **keys: Any) -> Path:
    content = {"model_type": "llama", "kv_cache": {"dtype": dtype, "scaling_factor": {"0": scales}}, **keys}
    (folder / "scales.json").write_text(json.dumps(content))
    return folder / "scales.json"


def test_vllms_file_replaces_tensors(tmp_path: Path) -> None:
    path = of_vllm(tmp_path, {"0": 0.5, "1": 2})
    assert found({"0.self_attn.kv_scale": 7}, path=path, model_type="llama") == [[[0.5, 0]] * 2, [[2, 0]] * 2]


@pytest.mark.parametrize(
    ("scales", "keys", "message"),
    [
        ({"0": 1}, {}, "there are no KV cache scales of layer 1"),
        ({"0": 1, "1": 1, "2": 1}, {}, "of layer 2, the model has 2"),
        ({"0": 1, "01": 1}, {}, r"scaling_factor\.0\.01: the key is not a layer's number"),
        ({"9" * 5000: 1}, {}, r"9{40}: the key is not a layer's number"),
        ({"0": True}, {}, "must be a number, not True"),
        ({"0": -1}, {}, "must be a positive number, not -1"),
        ({"0": 10**300}, {}, "must be a positive number, not inf"),
        ({"0": 1}, {"dtype": "int4"}, r"kv_cache\.dtype must be one of"),
        ({"0": 1}, {"model_type": "mistral"}, "model_type is 'mistral', the model's is 'llama'"),
        ({"0": 1}, {"kv_cache": 3}, "kv_cache must be an object, not 3"),
        ({"0": 1}, {"kv_cache": {"dtype": "int8"}}, "is for another|holds scales for int8"),
    ],
)
def test_files_of_vllm_that_are_refused(
    tmp_path: Path, scales: Mapping[str, Any], keys: dict[str, Any], message: str
) -> None:
    path = of_vllm(tmp_path, scales, **keys)
    with pytest.raises((CheckpointError, ConfigError), match=message) as caught:
        found({}, path=path, model_type="llama")
    assert str(path) in str(caught.value)


def of_lmdeploy(folder: Path, layers: Mapping[str, list[float]]) -> Path:
    for name, numbers in layers.items():
        (folder / f"layers.{name}.weight").write_bytes(np.array(numbers, "<f4").tobytes())
    return folder


def test_a_file_of_another_program_says_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "int8_kv_cache.json"
    path.write_text('{"layers.0.k_scale": 0.1, "layers.0.v_scale": 0.2}')
    with pytest.raises(CheckpointError, match=r"int8_kv_cache\.json: holds 'layers\.0\.k_scale', .* no 'kv_cache'"):
        found({}, path=path)


def test_lmdeploys_folder(tmp_path: Path) -> None:
    path = of_lmdeploy(
        tmp_path, {"0.past_kv_scale.0": [0.5, 0.25], "1.past_kv_scale.0": [2, -1, 4, 3], "0.attention.0": [1]}
    )
    assert found({}, dtype=INT8, path=path) == [[[0.5, 0], [0.25, 0]], [[2, -1], [4, 3]]]
    with pytest.raises(ConfigError, match="holds scales for int8, the KV cache is float8_e4m3fn"):
        found({}, path=path)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({}, "holds no file"),
        ({"0.past_kv_scale.1": [1, 1]}, "is of rank 1"),
        ({"0.past_kv_scale.0": [1, 1, 1]}, "has 12 bytes"),
        ({"0.past_kv_scale.0": [1, np.nan, 1, 0]}, "a zero point must be a number"),
    ],
)
def test_folders_of_lmdeploy_that_are_refused(tmp_path: Path, layers: Mapping[str, list[float]], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        found({}, dtype=INT8, path=of_lmdeploy(tmp_path, layers))


def test_a_path_to_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantization_param_path: .*no does not exist"):
        found({}, path=tmp_path / "no")
