"""Writes a model's safetensors files: headers first, then tensors in any order, one at a time.

Format: https://github.com/huggingface/safetensors#format. Above a size the model is split, with an index as
transformers writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np

from llmjax.checkpoint.checkpoint import INDEX, WEIGHTS
from llmjax.checkpoint.safetensors import DTYPES, LENGTH_BYTES
from llmjax.errors import CheckpointError

ALIGNMENT = 8  # of the data behind the header
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
            CheckpointError: it was not announced, not so, or written before.
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
        folder: that exists and has none of these files.
        tensors: every tensor that will be written, in the order in which files are filled.
        shard_bytes: what the tensors of a file take at most, unless one alone takes more.

    Yields:
        What takes the tensors' values.

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
                handles[file].write(_header(shard))
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


def _header(tensors: list[TensorSpec]) -> bytes:
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
