"""Files of safetensors, read by the safetensors package and by ours."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from llmjax.checkpoint.safetensors import TensorSpec, open_safetensors_writer, stored_tensors
from llmjax.errors import CheckpointError

F32, BF16, I8 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.int8)
RNG = np.random.default_rng(0)
VALUES = {
    "a": RNG.standard_normal((3, 5)).astype(np.float32),
    "odd": RNG.integers(-128, 128, (7, 3)).astype(np.int8),
    "b": RNG.standard_normal((4, 4)).astype(ml_dtypes.bfloat16),
    "fp8": RNG.standard_normal((5,)).astype(ml_dtypes.float8_e4m3fn),
    "shape": np.array([2, 3], np.int64),
    "none": np.zeros((0, 3), np.float16),
}


def write(folder: Path, *, shard_bytes: int = 1 << 20) -> None:
    specs = [TensorSpec(name, values.shape, values.dtype) for name, values in VALUES.items()]
    with open_safetensors_writer(folder, specs, shard_bytes=shard_bytes) as writer:
        for name in reversed(VALUES):  # any order
            writer.write(name, VALUES[name])


def test_one_file(tmp_path: Path) -> None:
    write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    found = stored_tensors(tmp_path)
    for name, values in VALUES.items():
        assert found[name].stored.dtype == values.dtype and found[name].stored.tobytes() == values.tobytes()
        assert found[name].shape == values.shape and found[name].stored.flags.aligned
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"} and set(file.keys()) == set(VALUES)
        assert np.array_equal(file.get_tensor("a"), VALUES["a"]) and np.array_equal(
            file.get_tensor("odd"), VALUES["odd"]
        )


def test_shards_and_their_index(tmp_path: Path) -> None:
    write(tmp_path, shard_bytes=64)
    names = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == names
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in VALUES.values())
    assert index["weight_map"]["a"] == names[0] and set(index["weight_map"]) == set(VALUES)
    assert np.array_equal(load_file(tmp_path / names[0])["a"], VALUES["a"])
    found = stored_tensors(tmp_path)
    assert all(found[name].stored.tobytes() == values.tobytes() for name, values in VALUES.items())


def test_mistakes_are_named(tmp_path: Path) -> None:
    spec = TensorSpec("a", (3, 5), F32)
    with (
        pytest.raises(CheckpointError, match="tensor 'a' was not written"),
        open_safetensors_writer(tmp_path, [spec], shard_bytes=10),
    ):
        pass
    with open_safetensors_writer(tmp_path, [spec], shard_bytes=10) as writer:
        with pytest.raises(CheckpointError, match="'b' was not announced"):
            writer.write("b", VALUES["a"])
        writer.write("a", VALUES["a"])
        with pytest.raises(CheckpointError, match="'a' was not announced, or is written twice"):
            writer.write("a", VALUES["a"])
    with open_safetensors_writer(tmp_path, [spec, TensorSpec("b", (3, 5), F32)], shard_bytes=100) as writer:
        writer.write("b", VALUES["a"])
        with pytest.raises(CheckpointError, match=r"announced as float32 \[3, 5\], not bfloat16 \[4, 4\]"):
            writer.write("a", VALUES["b"])
        writer._waiting.clear()
    with pytest.raises(CheckpointError, match="announced twice"):
        open_safetensors_writer(tmp_path, [spec, spec], shard_bytes=10).__enter__()
    with pytest.raises(CheckpointError, match="complex64 cannot be stored"):
        open_safetensors_writer(tmp_path, [TensorSpec("a", (1,), np.dtype("c8"))], shard_bytes=10).__enter__()
    with pytest.raises(CheckpointError, match="cannot be written"):
        open_safetensors_writer(tmp_path / "nowhere", [spec], shard_bytes=10).__enter__()
