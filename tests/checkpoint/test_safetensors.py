"""The safetensors reader against files of the `safetensors` package, and against malformed ones."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from llmjax.checkpoint.safetensors import open_safetensors
from llmjax.errors import CheckpointError

F32 = np.dtype(np.float32)


def write(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def test_types_and_shapes_of_the_reference_writer(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base = rng.standard_normal((3, 5)) * 50
    types = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", ml_dtypes.bfloat16]
    tensors = {f"t{i}": np.abs(base).astype(dtype) for i, dtype in enumerate(types)}
    tensors |= {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 4), np.float32)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    opened = open_safetensors(tmp_path / "x.safetensors")
    assert set(opened) == set(tensors)
    for name, tensor in tensors.items():
        assert opened[name].shape == tensor.shape
        assert opened[name].nbytes == tensor.nbytes
        values = opened[name].read(tensor.dtype)
        assert values.dtype == tensor.dtype
        assert np.array_equal(values, tensor)
    assert opened["t12"].type_name == "BF16"


def test_bf16_is_a_view_and_converts_exactly(tmp_path: Path) -> None:
    weights = np.random.default_rng(1).standard_normal((4, 8)).astype(ml_dtypes.bfloat16)
    save_file({"w": weights}, tmp_path / "x.safetensors")
    tensor = open_safetensors(tmp_path / "x.safetensors")["w"]
    view = tensor.read(np.dtype(ml_dtypes.bfloat16))
    assert not view.flags.owndata and not view.flags.writeable
    assert np.array_equal(tensor.read(F32), weights.astype(np.float32))
    assert np.array_equal(tensor.read(np.dtype(np.float16)), weights.astype(np.float16))


def test_powers_of_two_of_the_microscaling_formats(tmp_path: Path) -> None:
    header = {"w": {"dtype": "F8_E8M0", "shape": [2, 2], "data_offsets": [0, 4]}}
    tensor = open_safetensors(write(tmp_path / "x.safetensors", header, bytes([0, 127, 254, 255])))["w"]
    assert (tensor.shape, tensor.nbytes, tensor.type_name) == ((2, 2), 4, "F8_E8M0")
    assert np.array_equal(tensor.read(F32), np.array([[2.0**-127, 1], [2.0**127, np.nan]], np.float32), equal_nan=True)


def test_integers_are_read_only_as_themselves(tmp_path: Path) -> None:
    save_file({"w": np.arange(4, dtype=np.int32)}, tmp_path / "x.safetensors")
    tensor = open_safetensors(tmp_path / "x.safetensors")["w"]
    assert tensor.read(np.dtype(np.int32)).tolist() == [0, 1, 2, 3]
    with pytest.raises(CheckpointError, match="'w' of type I32 cannot be read as float32"):
        tensor.read(F32)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "invalid JSON in header"),
        (b"[" * 100_000, b"", "invalid JSON in header"),
        (b"\xff\xfe", b"", "invalid UTF-8 in header"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", "invalid JSON in header"),
        (b'{"a": 1, "a": 2}', b"", "invalid JSON in header"),
        ([], b"", "invalid JSON in header"),
        ({"w": 3}, b"", "integer `3`, expected struct TensorInfo"),
        ({"w": {"dtype": "F32", "shape": [2]}}, bytes(8), "missing field `data_offsets`"),
        ({"w": entry(dtype="C64", shape=[1])}, bytes(8), "tensor 'w': dtype C64 is not supported; supported are F64"),
        ({"w": entry(dtype="F4", shape=[16])}, bytes(8), "tensor 'w': dtype F4 is not supported"),
        ({"w": entry(dtype="F12")}, bytes(8), "unknown variant `F12`"),
        ({"w": entry(dtype=["F32"])}, bytes(8), "sequence, expected string"),
        ({"w": entry(shape=[-2])}, bytes(8), "`-2`, expected usize"),
        ({"w": entry(shape=[2.0])}, bytes(8), "`2.0`, expected usize"),
        ({"w": entry(shape=[True, 2])}, bytes(8), "`true`, expected usize"),
        ({"w": entry(shape=[2**62, 8])}, bytes(8), "overflow computing buffer size"),
        ({"w": entry(shape=[2**40])}, bytes(8), "invalid shape, data type, or offset for tensor"),
        ({"w": entry(shape=[0, 2**70], data_offsets=[0, 0])}, b"", "expected usize"),
        ({"w": entry(shape=[0, 2**62], data_offsets=[0, 0])}, b"", "tensor 'w': shape .* is too large"),
        ({"w": entry(shape=[2**62, 2**62, 0], data_offsets=[0, 0])}, b"", "overflow computing buffer size"),
        ({"w": entry(shape=[0] * 33, data_offsets=[0, 0])}, b"", "is too large"),
        ({"w": entry(shape=[3])}, bytes(8), "invalid shape, data type, or offset for tensor"),
        ({"w": entry(data_offsets=[8, 0])}, bytes(8), "invalid offset for tensor `w`"),
        ({"w": entry(data_offsets=[0, 4, 8])}, bytes(8), "invalid length 3, expected 2"),
        ({"w": entry()}, bytes(7), "file not fully covered"),
        ({"w": entry()}, bytes(9), "file not fully covered"),
        ({"v": entry(), "w": entry(data_offsets=[4, 12])}, bytes(12), "invalid offset for tensor `w`"),
        ({"w": entry(data_offsets=[4, 12])}, bytes(12), "invalid offset for tensor `w`"),
    ],
)
def test_malformed_headers(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    path = write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_safetensors(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [3, 2**26, 2**32, 2**63, 2**64 - 1])
def test_header_length_beyond_the_file(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "x.safetensors", b"{}" if length > 3 else b"{", length=length)
    with pytest.raises(CheckpointError, match=r"invalid header length|header too (large|small)"):
        open_safetensors(path)


def test_a_file_that_is_replaced_while_it_is_opened(
    tmp_path: Path, valid: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.safetensors").write_bytes(valid)

    def replaced(path: Path, framework: str) -> Any:
        longer = tmp_path / "longer"
        save_file({"a": np.zeros(1000, np.float32)}, longer)
        return safetensors.safe_open(longer, framework)

    monkeypatch.setattr("llmjax.checkpoint.safetensors.safe_open", replaced)
    with pytest.raises(CheckpointError, match="was replaced while it was opened"):
        open_safetensors(tmp_path / "x.safetensors")


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_files_shorter_than_the_length(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"invalid header length|header too (large|small)"):
        open_safetensors(tmp_path / "x.safetensors")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        open_safetensors(tmp_path / "x.safetensors")


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("valid") / "x.safetensors"
    tensors = {"a.weight": np.ones((4, 3), np.float32), "b": np.arange(7, dtype=np.int16), "c": np.zeros((2, 0), "f2")}
    save_file(tensors, path, metadata={"format": "np"})
    return path.read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@settings(max_examples=300)
@given(data=st.data())
def test_damaged_files_are_refused_or_read(valid: bytes, folder: Path, data: st.DataObject) -> None:
    content = bytearray(valid[: data.draw(st.just(len(valid)) | st.integers(0, len(valid)))])
    for _ in range(data.draw(st.integers(0, 6))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / "new").write_bytes(content)
    path = folder / "x.safetensors"
    os.replace(folder / "new", path)  # a new file: the last one may still be mapped
    tracemalloc.start()
    try:
        for tensor in open_safetensors(path).values():
            assert tensor.read(tensor.stored.dtype).shape == tensor.shape
    except CheckpointError as error:
        assert "\n" not in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**20
