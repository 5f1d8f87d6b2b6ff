"""The safetensors container: a JSON header over raw little-endian tensors, mapped and never copied as a whole.

Format: https://github.com/huggingface/safetensors#format. Its rules are enforced, so a header that
lies about shapes, offsets or lengths is refused before any tensor is read.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from llmjax.errors import CheckpointError

LENGTH_BYTES = 8
MAX_DIMS = 32
MAX_HEADER_BYTES = 100_000_000  # the reference implementation's limit

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "F64": np.dtype("<f8"),
        "F32": np.dtype("<f4"),
        "F16": np.dtype("<f2"),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
        "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
        "I64": np.dtype("<i8"),
        "I32": np.dtype("<i4"),
        "I16": np.dtype("<i2"),
        "I8": np.dtype("i1"),
        "U64": np.dtype("<u8"),
        "U32": np.dtype("<u4"),
        "U16": np.dtype("<u2"),
        "U8": np.dtype("u1"),
        "BOOL": np.dtype("?"),
    }
)
"""Types that can be read, by the header's name for them."""

WHOLE = frozenset(name for name, dtype in DTYPES.items() if dtype.kind in "iub")


@dataclass(frozen=True, eq=False)
class SafetensorsTensor:
    """A tensor where it lies in the file.

    Attributes:
        name: as in the file.
        type_name: the header's dtype, for example ``BF16``.
        shape: as in torch.
        stored: array of that shape and type, a read-only view of the mapped file.
        path: the file, for messages.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    stored: np.ndarray
    path: Path

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    def row_source(self) -> None:
        """Plain numbers have none."""

    def matrix(self, index: int, rows: slice, name: str) -> SafetensorsTensor:
        """See `StoredStack`."""
        stored = self.stored[index, rows]
        return replace(self, name=name, shape=stored.shape, stored=stored)

    def read(self, dtype: np.dtype) -> np.ndarray:
        """The values as `dtype`, rounded to nearest even; of the stored type: the mapped view itself, not writable.

        Raises:
            CheckpointError: whole numbers are asked for as another type.
        """
        dtype = np.dtype(dtype)
        if dtype == self.stored.dtype:
            return self.stored
        if self.type_name in WHOLE:
            raise CheckpointError(
                f"{self.path}: tensor {self.name!r} of type {self.type_name} cannot be read as {dtype}"
            )
        with np.errstate(over="ignore", invalid="ignore"):  # what exceeds f16 becomes inf, as anywhere
            return self.stored.astype(dtype)


def open_safetensors(path: Path) -> dict[str, SafetensorsTensor]:
    """Map one file.

    Returns:
        Its tensors by name, in file order.

    Raises:
        CheckpointError: the file cannot be read or is malformed.
    """
    try:
        with path.open("rb") as handle:
            size = handle.seek(0, 2)
            data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    base = LENGTH_BYTES + length
    if size < LENGTH_BYTES or length > MAX_HEADER_BYTES or base > size:
        raise CheckpointError(f"{path}: the header's length is {length} bytes, but the file has {size}")
    header = _header(path, data[LENGTH_BYTES:base])
    return {
        entry.name: SafetensorsTensor(
            name=entry.name,
            type_name=entry.type_name,
            shape=entry.shape,
            stored=np.frombuffer(data, DTYPES[entry.type_name], prod(entry.shape), base + entry.begin).reshape(
                entry.shape
            ),
            path=path,
        )
        for entry in _check_cover(path, header, size - base)
    }


@dataclass(frozen=True)
class _Entry:
    name: str
    type_name: str
    shape: tuple[int, ...]
    begin: int  # from the end of the header
    end: int


def _header(path: Path, text: bytes) -> list[_Entry]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name appears twice")
        return found

    try:
        header = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is no valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is no JSON object")
    return [_entry(path, name, value) for name, value in header.items() if name != "__metadata__"]


def _entry(path: Path, name: str, value: object) -> _Entry:
    def fail(problem: str) -> NoReturn:
        raise CheckpointError(f"{path}: tensor {name!r}: {problem}")

    def sizes(key: str) -> tuple[int, ...]:
        found = value.get(key) if isinstance(value, dict) else None
        if not isinstance(found, list) or not all(type(size) is int and size >= 0 for size in found):
            fail(f"{key} is {str(found)[:80]}, not a list of sizes")
        return tuple(found)

    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        fail("its header entry must have dtype, shape and data_offsets and nothing else")
    if not isinstance(value["dtype"], str) or value["dtype"] not in DTYPES:
        fail(f"dtype {str(value['dtype'])[:80]!r} is not supported; supported are {', '.join(DTYPES)}")
    shape, offsets = sizes("shape"), sizes("data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        fail(f"data_offsets are {list(offsets)[:4]}, not a begin and an end")
    itemsize = DTYPES[value["dtype"]].itemsize
    # NumPy refuses such shapes even where another dimension is zero.
    if len(shape) > MAX_DIMS or prod(size or 1 for size in shape) * itemsize >= 2**63:
        fail(f"shape {str(list(shape))[:80]} is too large")
    needed = prod(shape) * itemsize
    if needed != offsets[1] - offsets[0]:
        fail(
            f"{value['dtype']} {list(shape)} needs {needed} bytes, but its data_offsets span {offsets[1] - offsets[0]}"
        )
    return _Entry(name, value["dtype"], shape, *offsets)


def _check_cover(path: Path, entries: list[_Entry], size: int) -> list[_Entry]:
    """Tensors must follow each other without hole or overlap, from the header's end to the file's."""
    entries = sorted(entries, key=lambda entry: (entry.begin, entry.end))
    pos = 0
    for entry in entries:
        if entry.begin != pos:
            problem = "overlaps another" if entry.begin < pos else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor {entry.name!r} at {entry.begin} {problem}; expected {pos}")
        pos = entry.end
    if pos != size:
        raise CheckpointError(f"{path}: the tensors take {pos} bytes, but {size} follow the header")
    return entries
