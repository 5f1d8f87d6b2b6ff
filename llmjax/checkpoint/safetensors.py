"""safetensors files, read and written: a JSON header over raw little-endian tensors.

Files are mapped and never copied as a whole. The safetensors package reads headers and enforces the format's rules, so
one that lies about shapes, offsets or lengths is refused before any tensor is read. Written are headers first, then
tensors in any order, one at a time; above a size the model is split, with an index as transformers writes it.
Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from llmjax.checkpoint.files import instead_of_weights, map_file, read_object
from llmjax.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LENGTH_BYTES = 8
MAX_DIMS = 32

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
    """A tensor as a view of the mapped file.

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

    def transposed(self) -> SafetensorsTensor:
        """The transpose of a matrix, without a copy."""
        return replace(self, shape=self.shape[::-1], stored=self.stored.T)

    def flat(self) -> SafetensorsTensor:
        """The numbers as a vector, without a copy."""
        return replace(self, shape=(self.stored.size,), stored=self.stored.reshape(-1))

    def taken(self, rows: np.ndarray) -> SafetensorsTensor:
        """Some rows, intp [n]; consecutive rows are not copied, others are."""
        in_turn = len(rows) and bool((np.diff(rows) == 1).all())
        stored = self.stored[rows[0] : rows[-1] + 1] if in_turn else self.stored[rows]
        return replace(self, shape=stored.shape, stored=stored)

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
    data = map_file(path)
    try:
        with safe_open(path, "np") as file:  # which checks that the tensors cover the file, without hole or overlap
            found = [(name, file.get_slice(name)) for name in file.offset_keys()]
            header = [(name, entry.get_dtype(), tuple(entry.get_shape())) for name, entry in found]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None
    except (SafetensorError, OverflowError) as error:
        raise CheckpointError(f"{path}: {' '.join(str(error).split())[:200]}") from None
    place = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    tensors = {}
    for name, type_name, shape in header:
        dtype = _checked_dtype(path, name, type_name, shape)
        if (end := place + prod(shape) * dtype.itemsize) > len(data):
            raise CheckpointError(f"{path}: was replaced while it was opened")
        stored = np.frombuffer(data, dtype, prod(shape), place).reshape(shape)
        tensors[name] = SafetensorsTensor(name, type_name, shape, stored, path)
        place = end
    return tensors


def _checked_dtype(path: Path, name: str, type_name: str, shape: tuple[int, ...]) -> np.dtype:
    dtype = DTYPES.get(type_name)
    if dtype is None:
        supported = ", ".join(DTYPES)
        raise CheckpointError(f"{path}: tensor {name!r}: dtype {type_name} is not supported; supported are {supported}")
    # NumPy refuses such shapes even where another dimension is zero.
    if len(shape) > MAX_DIMS or prod(size or 1 for size in shape) * dtype.itemsize >= 2**63:
        raise CheckpointError(f"{path}: tensor {name!r}: shape {str(list(shape))[:80]} is too large")
    return dtype


def stored_tensors(path: Path, *, weights: str = WEIGHTS) -> dict[str, SafetensorsTensor]:
    """The stored tensors of a folder's safetensors files.

    Args:
        weights: the name of the file; an index of several has it too, with another ending.

    Raises:
        CheckpointError: there is no such file, or one is missing or malformed.
    """
    index = f"{weights}.index.json"
    if (path / weights).exists():
        return open_safetensors(path / weights)
    if (path / index).exists():
        return _open_shards(path, index)
    names = sorted(each.name for each in path.iterdir())
    others = instead_of_weights(names)
    if not others:
        named = next((name for name in names if name.endswith(".safetensors")), None)
        others = f", but {named}, which must have one of these names" if named else "; other weight files are not read"
    raise CheckpointError(f"{path}: has neither {weights} nor {index}{others}")


def _open_shards(path: Path, named: str) -> dict[str, SafetensorsTensor]:
    """Every tensor of every file that the index names; where two files have it, the one that the index says."""
    index = read_object(path / named)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / named}: weight_map is missing or empty")
    shards: dict[str, dict[str, SafetensorsTensor]] = {}
    tensors: dict[str, SafetensorsTensor] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
            raise CheckpointError(
                f"{path / named}: tensor {name!r} is said to be in {file!r}, which is not a file name"
            )
        if file not in shards:
            if not (path / file).exists():
                raise CheckpointError(f"{path / file}: is missing, but {named} names it")
            shards[file] = open_safetensors(path / file)
        if name not in shards[file]:
            raise CheckpointError(f"{path / file}: has no tensor {name!r}, but {named} says so")
        tensors[name] = shards[file][name]
    for shard in shards.values():
        for name, tensor in shard.items():
            tensors.setdefault(name, tensor)
    return tensors


ALIGNMENT = 8  # of the data after the header
METADATA = {"format": "pt"}  # without it transformers refuses a file
_TYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that is to be written.

    Attributes:
        name: in the file.
        shape: as in torch.
        dtype: one of `safetensors.DTYPES`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Place:
    spec: TensorSpec
    file: str
    start: int


class SafetensorsWriter:
    """Takes announced tensors in any order.

    Args:
        folder: where the files are.
        places: where each tensor goes.
        handles: open files by name.
    """

    def __init__(self, folder: Path, places: Mapping[str, _Place], handles: Mapping[str, BinaryIO]) -> None:
        self._folder = folder
        self._waiting = dict(places)
        self._handles = handles

    def write(self, name: str, values: np.ndarray) -> None:
        """A tensor's values.

        Raises:
            CheckpointError: it was not announced, was announced with another shape or type, or was written before.
        """
        place = self._waiting.pop(name, None)
        if place is None:
            raise CheckpointError(f"{self._folder}: tensor {name!r} was not announced, or is written twice")
        if values.shape != place.spec.shape or values.dtype != place.spec.dtype:
            raise CheckpointError(
                f"{self._folder}: tensor {name!r} was announced as {place.spec.dtype} {list(place.spec.shape)}, not "
                f"{values.dtype} {list(values.shape)}"
            )
        handle = self._handles[place.file]
        handle.seek(place.start)
        # NumPy has no buffers of bfloat16 and float8, so bytes are what is handed over.
        handle.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)

    def finish(self) -> None:
        """Raises CheckpointError if an announced tensor was not written."""
        if self._waiting:
            raise CheckpointError(f"{self._folder}: tensor {next(iter(self._waiting))!r} was not written")


@contextmanager
def open_safetensors_writer(
    folder: Path, tensors: Iterable[TensorSpec], *, shard_bytes: int
) -> Iterator[SafetensorsWriter]:
    """Writes ``model.safetensors``, or its shards and their index.

    Args:
        folder: an existing folder without these files.
        tensors: every tensor that will be written, in the order in which files are filled.
        shard_bytes: the most bytes of tensors in a file, unless a single tensor has more.

    Yields:
        The writer of the tensors' values.

    Raises:
        CheckpointError: a file cannot be written, or a name or type cannot be stored.
    """
    shards = _shards(folder, list(tensors), shard_bytes)
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    places: dict[str, _Place] = {}
    try:
        with ExitStack() as stack:
            handles: dict[str, BinaryIO] = {}
            for file, shard in zip(names, shards, strict=True):
                handles[file] = stack.enter_context((folder / file).open("wb"))
                handles[file].write(_header_bytes(shard))
                start = handles[file].tell()
                for spec in shard:
                    places[spec.name] = _Place(spec, file, start)
                    start += spec.nbytes
            writer = SafetensorsWriter(folder, places, handles)
            yield writer
            writer.finish()
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(place.spec.nbytes for place in places.values())},
                "weight_map": {name: place.file for name, place in sorted(places.items())},
            }
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror}") from None


def _shards(folder: Path, tensors: list[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    names: set[str] = set()
    size = 0
    for spec in tensors:
        if spec.name in names:
            raise CheckpointError(f"{folder}: tensor {spec.name!r} is announced twice")
        if spec.dtype not in _TYPE_NAMES:
            raise CheckpointError(f"{folder}: tensor {spec.name!r} of type {spec.dtype} cannot be stored")
        names.add(spec.name)
        if shards[-1] and size + spec.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    # Wide numbers first, so that each tensor starts at a multiple of what it is made of.
    return [sorted(shard, key=lambda spec: -spec.dtype.itemsize) for shard in shards]


def _header_bytes(tensors: list[TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": METADATA}
    start = 0
    for spec in tensors:
        stop = start + spec.nbytes
        entries[spec.name] = {
            "dtype": _TYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
