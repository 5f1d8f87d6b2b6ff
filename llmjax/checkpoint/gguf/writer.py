"""Writes GGUF files, version 3, little-endian: header first, then one tensor's data at a time.

Format: ggml's docs/gguf.md. The file appears under its name only when it is complete.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llmjax.checkpoint.gguf.file import (
    ARRAY,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_DIMS,
    MAX_KEY_BYTES,
    MAX_NAME_BYTES,
    NUMBERS,
    STRING,
)
from llmjax.errors import CheckpointError
from llmjax.weights.ggml.types import GGML_TYPES

VERSION = 3
ALIGNMENT_KEY = "general.alignment"
_TYPE_IDS = {dtype: type_id for type_id, dtype in NUMBERS.items()}
_BLOCKS = {block.name: (type_id, block) for type_id, block in GGML_TYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """The header's entry for a tensor.

    Attributes:
        name: up to 64 bytes.
        shape: outermost dimension first.
        type_name: ggml's name of the stored type, for example ``Q4_K``.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str

    @property
    def nbytes(self) -> int:
        block = _BLOCKS[self.type_name][1]
        elements = 1
        for size in self.shape:
            elements *= size
        return elements // block.elems * block.nbytes


class GGUFWriter:
    """Takes tensors in the order in which they were announced.

    Args:
        handle: binary file at its start.
        path: its name, for messages.
        tensors: all tensors that will be written, in order.
        alignment: tensors start at multiples of this number of bytes.
    """

    def __init__(self, handle: BinaryIO, path: Path, tensors: list[TensorInfo], alignment: int) -> None:
        self._handle = handle
        self._path = path
        self._waiting = iter(tensors)
        self._alignment = alignment

    def write(self, name: str, chunks: Iterable[np.ndarray]) -> None:
        """Writes the data of the next tensor.

        Args:
            name: name of the tensor, which must be the next one announced.
            chunks: arrays whose bytes, one after the other, are the stored data; plain numbers little-endian.

        Raises:
            CheckpointError: another tensor is next, or the bytes are more or fewer than announced.
        """
        info = next(self._waiting, None)
        if info is None or info.name != name:
            raise CheckpointError(
                f"{self._path}: tensor {name!r} was written where {info.name if info else 'the end'!r} was announced"
            )
        written = 0
        for chunk in chunks:
            # NumPy has no buffers of bfloat16, so bytes are what is handed over.
            written += self._handle.write(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)
        if written != info.nbytes:
            raise CheckpointError(
                f"{self._path}: tensor {name!r} was announced with {info.nbytes} bytes, not {written}"
            )
        self._handle.write(bytes(-written % self._alignment))

    def finish(self) -> None:
        """Raises CheckpointError if an announced tensor was not written."""
        if (missing := next(self._waiting, None)) is not None:
            raise CheckpointError(f"{self._path}: tensor {missing.name!r} was announced but not written")


@contextmanager
def open_gguf_writer(
    path: str | Path, metadata: Mapping[str, Any], tensors: Iterable[TensorInfo]
) -> Iterator[GGUFWriter]:
    """Writes a GGUF file; if anything fails, no new file remains, and an old one of that name stays as it was.

    Args:
        path: the file.
        metadata: by key; str, bool, int and float (as u32 or i32, u64 or i64 where these do not hold it, and f32),
            NumPy scalars and one-dimensional arrays for other widths, lists of str. ``general.alignment`` is obeyed.
        tensors: every tensor that will be written, in order.

    Yields:
        The writer of the tensors' data.

    Raises:
        CheckpointError: the file cannot be written, or a key, value or tensor cannot be stored.
    """
    path = Path(path)
    announced = list(tensors)
    alignment = int(metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT))
    if alignment <= 0 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: {ALIGNMENT_KEY} is {alignment}, not a power of two")
    header = _header(path, metadata, announced, alignment)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as handle:
            handle.write(header)
            writer = GGUFWriter(handle, path, announced, alignment)
            yield writer
            writer.finish()
        temporary.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _header(path: Path, metadata: Mapping[str, Any], tensors: list[TensorInfo], alignment: int) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        if not 0 < len(key.encode()) <= MAX_KEY_BYTES:
            raise CheckpointError(f"{path}: key {key[:40]!r} is empty or longer than {MAX_KEY_BYTES} bytes")
        try:
            parts += [_string(key), _value(value)]
        except (TypeError, ValueError, OverflowError, struct.error) as error:
            raise CheckpointError(f"{path}: key {key!r}: {error}") from None
    offset = 0
    names: set[str] = set()
    for info in tensors:
        _check(path, info, names)
        parts += [_string(info.name), struct.pack(f"<I{len(info.shape)}Q", len(info.shape), *reversed(info.shape))]
        parts.append(struct.pack("<IQ", _BLOCKS[info.type_name][0], offset))
        offset += -(-info.nbytes // alignment) * alignment
    header = b"".join(parts)
    return header + bytes(-len(header) % alignment)


def _check(path: Path, info: TensorInfo, names: set[str]) -> None:
    if not 0 < len(info.name.encode()) <= MAX_NAME_BYTES or info.name in names:
        raise CheckpointError(
            f"{path}: tensor {info.name!r} is unnamed, named twice or longer than {MAX_NAME_BYTES} bytes"
        )
    names.add(info.name)
    if info.type_name not in _BLOCKS:
        raise CheckpointError(f"{path}: tensor {info.name!r} has unknown type {info.type_name}")
    if not 1 <= len(info.shape) <= MAX_DIMS or min(info.shape) < 1:
        raise CheckpointError(f"{path}: tensor {info.name!r} has shape {list(info.shape)}, not 1 to {MAX_DIMS} sizes")
    elems = _BLOCKS[info.type_name][1].elems
    if info.shape[-1] % elems:
        raise CheckpointError(
            f"{path}: tensor {info.name!r} has rows of {info.shape[-1]}, not a multiple of {info.type_name}'s {elems}"
        )


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Type and value."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, list | tuple):
        if not all(isinstance(text, str) for text in value):
            raise TypeError("lists may hold strings only; numbers must be NumPy arrays")
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_string, value))
    if isinstance(value, np.ndarray):
        if value.ndim != 1:
            raise TypeError(f"an array of {value.ndim} dimensions cannot be stored")
        return struct.pack("<IIQ", ARRAY, _type_id(value.dtype), len(value)) + _little(value)
    number = _sized(value)
    return struct.pack("<I", _type_id(number.dtype)) + _little(number)


def _sized(value: Any) -> np.generic:
    """A number as the type that converters store it in."""
    if isinstance(value, np.generic):
        return value
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, float):
        return np.float32(value)
    if isinstance(value, int):
        kinds: tuple[type[np.integer], ...] = (np.uint32, np.uint64) if value >= 0 else (np.int32, np.int64)
        if not np.iinfo(np.int64).min <= value <= np.iinfo(np.uint64).max:
            raise OverflowError(f"{value} does not fit in 64 bits")
        return next(kind(value) for kind in kinds if np.iinfo(kind).min <= value <= np.iinfo(kind).max)
    raise TypeError(f"a value of type {type(value).__name__} cannot be stored")


def _type_id(dtype: np.dtype) -> int:
    if dtype not in _TYPE_IDS:
        raise TypeError(f"numbers of type {dtype} cannot be stored")
    return _TYPE_IDS[dtype]


def _little(values: Any) -> bytes:
    data: bytes = values.astype(values.dtype.newbyteorder("<")).tobytes()
    return data
