"""GGUF files as written, read by our reader and by the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.gguf.writer import TensorInfo, open_gguf_writer
from llmjax.errors import CheckpointError
from llmjax.weights.ggml.reference import quantize

F32 = np.dtype(np.float32)
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "empty": "",
    "text": "日本 🎉",
    "yes": True,
    "no": False,
    "u8": np.uint8(200),
    "i8": np.int8(-100),
    "u16": np.uint16(60000),
    "i16": np.int16(-30000),
    "u32": 7,
    "i32": -7,
    "u64": 2**40,
    "i64": -(2**40),
    "f32": 0.5,
    "f64": np.float64(0.1),
    "strings": ["", "a", "ß"],
    "none": [],
    **{f"array_{code}": np.array([0, 1, 1], code) for code in ("?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8")},
    "array_f4": np.array([1e-5, -0.0], np.float32),
    "array_f8": np.array([0.1], np.float64),
}


def write(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...], np.ndarray]]) -> Path:
    infos = [TensorInfo(name, shape, kind) for name, (kind, shape, _) in tensors.items()]
    with open_gguf_writer(path, metadata, infos) as writer:
        for name, (_, _, data) in tensors.items():
            writer.write(name, [data])
    return path


def values(metadata: Any) -> dict[str, Any]:
    return {key: value.tolist() if isinstance(value, np.ndarray | np.generic) else value for key, value in metadata}


def example(alignment: int) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...], np.ndarray]]]:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((3, 512)).astype(np.float32)
    return METADATA | {"general.alignment": alignment}, {
        "vector": ("F32", (5,), weights[0, :5]),
        "halves": ("BF16", (3, 512), weights.astype(ml_dtypes.bfloat16)),
        "f16": ("F16", (2, 3, 4), weights[0, :24].astype(np.float16)),
        "experts": ("Q4_K", (3, 2, 256), quantize(weights, "q4_k")),
        "matrix": ("Q8_0", (3, 512), quantize(weights, "q8_0")),
    }


@pytest.mark.parametrize("alignment", [1, 32, 4096])
def test_every_kind_of_value_and_tensor(tmp_path: Path, alignment: int) -> None:
    metadata, tensors = example(alignment)
    path = write(tmp_path / "a.gguf", metadata, tensors)
    assert [file.name for file in tmp_path.iterdir()] == ["a.gguf"]

    ours = GGUFFile.open(path)
    assert ours.version == 3
    assert values(ours.metadata.items()) == values(metadata.items())
    assert [(t.name, t.type_name, t.shape) for t in ours.tensors.values()] == [
        (name, kind, shape) for name, (kind, shape, _) in tensors.items()
    ]
    for name, (_, _, data) in tensors.items():
        assert np.array_equal(ours.tensors[name].raw, data.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("alignment", [32, 4096])
def test_as_the_gguf_package_reads_it(tmp_path: Path, alignment: int) -> None:
    metadata, tensors = example(alignment)
    reader = gguf.GGUFReader(write(tmp_path / "a.gguf", metadata, tensors))
    kinds = {"u8": "UINT8", "i8": "INT8", "u16": "UINT16", "i16": "INT16", "u32": "UINT32", "i32": "INT32"}
    kinds |= {"u64": "UINT64", "i64": "INT64", "f32": "FLOAT32", "f64": "FLOAT64", "yes": "BOOL", "text": "STRING"}
    for key, value in metadata.items():
        field = reader.fields[key]
        assert field.contents() == (value.tolist() if isinstance(value, np.ndarray | np.generic) else value), key
        assert field.types[0].name == kinds.get(key, field.types[0].name)
    for tensor, (name, (kind, shape, data)) in zip(reader.tensors, tensors.items(), strict=True):
        assert (tensor.name, tensor.tensor_type.name) == (name, kind)
        assert tensor.shape.tolist() == list(reversed(shape))
        assert tensor.data.tobytes() == data.tobytes()


def test_data_in_chunks(tmp_path: Path) -> None:
    numbers = np.arange(12, dtype=np.float32)
    with open_gguf_writer(tmp_path / "a.gguf", {}, [TensorInfo("t", (3, 4), "F32")]) as writer:
        writer.write("t", (row[::-1][::-1] for row in numbers.reshape(3, 4)))
    assert np.array_equal(GGUFFile.open(tmp_path / "a.gguf").tensors["t"].read(F32), numbers.reshape(3, 4))


def fill(path: Path, infos: list[TensorInfo], *data: tuple[str, int]) -> None:
    """Write tensors of zeros by name and number."""
    with open_gguf_writer(path, {}, infos) as writer:
        for name, count in data:
            writer.write(name, [np.zeros(count, np.float32)])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([("b", 4)], "tensor 'b' was written where 'a' was announced"),
        ([("a", 3)], "tensor 'a' was announced with 16 bytes, not 12"),
        ([("a", 4)], "tensor 'b' was announced but not written"),
        ([("a", 4), ("b", 4), ("c", 4)], "tensor 'c' was written where 'the end' was announced"),
    ],
)
def test_a_failure_leaves_the_old_file(tmp_path: Path, data: list[tuple[str, int]], message: str) -> None:
    path = tmp_path / "a.gguf"
    path.write_text("old")
    with pytest.raises(CheckpointError, match=message):
        fill(path, [TensorInfo("a", (4,), "F32"), TensorInfo("b", (4,), "F32")], *data)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.gguf"]


@pytest.mark.parametrize(
    ("metadata", "infos", "message"),
    [
        ({"": 1}, [], "key '' is empty or longer than 65535 bytes"),
        ({"k": None}, [], "key 'k': a value of type NoneType cannot be stored"),
        ({"k": 2**64}, [], "key 'k': 18446744073709551616 does not fit in 64 bits"),
        ({"k": [1]}, [], "key 'k': lists may hold strings only"),
        ({"k": np.zeros((2, 2))}, [], "key 'k': an array of 2 dimensions cannot be stored"),
        ({"k": np.zeros(2, np.float16)}, [], "key 'k': numbers of type float16 cannot be stored"),
        ({"general.alignment": 24}, [], "general.alignment is 24, not a power of two"),
        ({}, [("t" * 65, (1,), "F32")], "is unnamed, named twice or longer than 64 bytes"),
        ({}, [("t", (1,), "F32"), ("t", (1,), "F32")], "tensor 't' is unnamed, named twice"),
        ({}, [("t", (1,), "Q9")], "tensor 't' has unknown type Q9"),
        ({}, [("t", (1, 1, 1, 1, 1), "F32")], "has shape"),
        ({}, [("t", (2, 33), "Q8_0")], "tensor 't' has rows of 33, not a multiple of Q8_0's 32"),
    ],
)
def test_refusals(tmp_path: Path, metadata: Any, infos: Any, message: str) -> None:
    opened = open_gguf_writer(tmp_path / "a.gguf", metadata, [TensorInfo(*info) for info in infos])
    with pytest.raises(CheckpointError, match=message) as caught, opened:
        pass
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written: No such file"):
        fill(tmp_path / "none" / "a.gguf", [])


KEYS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
ANY_VALUE = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(width=32, allow_nan=False),
    st.text(st.characters(codec="utf-8"), max_size=30),
    st.lists(st.text(st.characters(codec="utf-8"), max_size=5), max_size=5),
)


@settings(max_examples=60)
@given(
    st.dictionaries(KEYS.filter(lambda key: key != "general.alignment" and not key.startswith("split.")), ANY_VALUE),
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), max_size=5),
)
def test_any_file_is_read_back(tmp_path_factory: pytest.TempPathFactory, metadata: Any, shapes: Any) -> None:
    tensors = {f"t{i}": ("F32", tuple(shape), np.full(shape, i, np.float32)) for i, shape in enumerate(shapes)}
    file = GGUFFile.open(write(tmp_path_factory.mktemp("any") / "a.gguf", metadata, tensors))
    assert values(file.metadata.items()) == metadata
    for name, (_, shape, data) in tensors.items():
        assert file.tensors[name].shape == shape and np.array_equal(file.tensors[name].read(F32), data)
