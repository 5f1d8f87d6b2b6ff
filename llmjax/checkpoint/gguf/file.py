"""The GGUF container, versions 2 and 3, little-endian: header, metadata and the places of tensors.

Files come from strangers: every count, length and offset is compared with the size of the file before
anything is allocated or read, and whatever does not fit is a CheckpointError saying what and where.
Format: ggml's docs/gguf.md.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from llmjax.checkpoint.files import map_file
from llmjax.checkpoint.gguf.tensor import GGUFTensor
from llmjax.errors import CheckpointError
from llmjax.weights.ggml.types import GGML_TYPES, BlockType

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 64

BOOL, STRING, ARRAY = 7, 8, 9
NUMBERS: Mapping[int, np.dtype] = MappingProxyType(
    {
        0: np.dtype("u1"),
        1: np.dtype("i1"),
        2: np.dtype("<u2"),
        3: np.dtype("<i2"),
        4: np.dtype("<u4"),
        5: np.dtype("<i4"),
        6: np.dtype("<f4"),
        BOOL: np.dtype("?"),
        10: np.dtype("<u8"),
        11: np.dtype("<i8"),
        12: np.dtype("<f8"),
    }
)

SPLIT_NAME = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")


def shard_name(stem: str, index: int, count: int) -> str:
    """The name of a split file's part; ``index`` counts from 0."""
    return f"{stem}-{index + 1:05}-of-{count:05}.gguf"


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """An opened GGUF file, or all parts of a split one.

    Attributes:
        path: the (first) file.
        version: 2 or 3.
        metadata: by key; numbers and strings as Python values, arrays of numbers as np.ndarray, arrays of
            strings as list[str].
        tensors: by name, in file order.
    """

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Map a file and read its header; of a split file (name-00001-of-0000N.gguf) any part may be given.

        Raises:
            CheckpointError: the file cannot be read or is malformed, or a part is missing.
        """
        file = _open_shard(Path(path))
        count = file._split("count", 1)
        return file if count in (0, 1) else _join_shards(file, count)

    def _split(self, key: str, default: int = 0) -> int:
        """A whole number that a part of a split file says."""
        value = self.metadata.get(f"split.{key}", default)
        if type(value) is not int:
            raise CheckpointError(f"{self.path}: split.{key} is not a whole number")
        return value


def _open_shard(path: Path) -> GGUFFile:
    return _open(path, _Parser)


def _open(path: Path, parser: type[_Parser]) -> GGUFFile:
    data = map_file(path)
    if isinstance(data, bytes):
        raise CheckpointError(f"{path}: not a GGUF file: it is empty")
    return parser(path, data).file()


def _join_shards(file: GGUFFile, count: int) -> GGUFFile:
    name = SPLIT_NAME.fullmatch(file.path.name)
    if name is None or int(name["count"]) != count:
        raise CheckpointError(
            f"{file.path}: is one of {count} parts and must be called name-00001-of-{count:05}.gguf like its siblings"
        )
    shards = []
    for index in range(int(name["count"])):
        path = file.path.with_name(shard_name(name["stem"], index, int(name["count"])))
        if not path.exists():
            raise CheckpointError(f"{path}: is missing; {file.path.name} is one of {count} parts")
        shard = _open_shard(path)
        if shard._split("no", -1) != index or shard._split("count") != count:
            raise CheckpointError(f"{path}: split.no and split.count do not say part {index} of {count}")
        shards.append(shard)
    tensors: dict[str, GGUFTensor] = {}
    for shard in shards:
        for tensor in shard.tensors.values():
            if tensor.name in tensors:
                raise CheckpointError(f"{shard.path}: tensor {tensor.name!r} is in another part too")
            tensors[tensor.name] = tensor
    expected = shards[0]._split("tensors.count", len(tensors))
    if expected != len(tensors):
        raise CheckpointError(f"{shards[0].path}: split.tensors.count is {expected}, but the parts hold {len(tensors)}")
    return replace(shards[0], tensors=MappingProxyType(tensors))


@dataclass(frozen=True)
class _Record:
    name: str
    block: BlockType
    shape: tuple[int, ...]
    offset: int  # from the start of the data section

    @property
    def nbytes(self) -> int:
        elements = 1
        for size in self.shape:
            elements *= size  # Python integers: a hostile product cannot wrap around
        return elements // self.block.elems * self.block.nbytes


class _Parser:
    """Walks over the header; `pos` never passes the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.pos = 0

    def file(self) -> GGUFFile:
        if self.data[:4] != MAGIC:
            self.fail(f"not a GGUF file: it starts with {self.data[:4]!r}")
        self.pos = 4
        version = self.number("I", "version")
        if version and not version & 0xFFFF:  # a small number in the other byte order
            self.fail("is big-endian, which is not supported; convert it with llama.cpp's gguf_convert_endian.py")
        if version not in (2, 3):
            self.fail(f"GGUF version {version} is not supported, only 2 and 3")
        # The shortest tensor record has an empty name and one dimension, the shortest key an empty name and a byte.
        tensor_count = self.count("tensor count", least_bytes=8 + 4 + 8 + 4 + 8)
        key_count = self.count("key count", least_bytes=8 + 4 + 1)

        metadata: dict[str, Any] = {}
        for index in range(key_count):
            key = self.name(f"name of key {index}", most_bytes=MAX_KEY_BYTES)
            if key in metadata:
                self.fail(f"key {key!r} appears twice")
            metadata[key] = self.value(self.number("I", f"type of key {key!r}"), f"key {key!r}")
        records = self.records(tensor_count)
        tensors = self.place(records, self.alignment(metadata))
        return GGUFFile(self.path, version, MappingProxyType(metadata), MappingProxyType(tensors))

    def fail(self, message: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {message}")

    def skip(self, length: int, what: str) -> int:
        """Step over `length` bytes and return where they start."""
        start = self.pos
        if length > self.size - start:
            self.fail(f"{what} needs {length} bytes at offset {start}, but the file ends at {self.size}")
        self.pos = start + length
        return start

    def number(self, code: str, what: str) -> Any:
        start = self.skip(struct.calcsize("<" + code), what)
        return struct.unpack_from("<" + code, self.data, start)[0]

    def count(self, what: str, *, least_bytes: int) -> int:
        """A u64 number of things that take at least `least_bytes` each."""
        count = self.number("Q", what)
        if count * least_bytes > self.size - self.pos:
            self.fail(f"{what} is {count}, more than the {self.size - self.pos} bytes that follow can hold")
        return int(count)

    def name(self, what: str, *, most_bytes: int) -> str:
        start = self.pos
        name = self.string(what, most_bytes=most_bytes)
        if not name:
            self.fail(f"{what} at offset {start} is empty")
        return name

    def string(self, what: str, *, most_bytes: int | None = None) -> str:
        length = self.number("Q", f"length of {what}")
        if most_bytes is not None and length > most_bytes:
            self.fail(f"{what} is {length} bytes long, more than {most_bytes}")
        start = self.skip(length, what)
        try:
            return self.data[start : self.pos].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} at offset {start} is not UTF-8")

    def value(self, type_id: int, what: str) -> Any:
        if type_id == STRING:
            return self.string(what)
        if type_id == ARRAY:
            return self.array(what)
        values = self.numbers(type_id, 1, what)
        return values[0].item()

    def array(self, what: str) -> np.ndarray | list[str]:
        type_id = self.number("I", f"element type of {what}")
        if type_id == STRING:
            return self.strings(self.count(f"length of {what}", least_bytes=8), what)
        if type_id == ARRAY:
            self.fail(f"{what} is an array of arrays, which is not supported")
        dtype = self.number_type(type_id, what)
        return self.numbers(type_id, self.count(f"length of {what}", least_bytes=dtype.itemsize), what)

    def number_type(self, type_id: int, what: str) -> np.dtype:
        if type_id not in NUMBERS:
            self.fail(f"{what} has unknown value type {type_id}")
        return NUMBERS[type_id]

    def numbers(self, type_id: int, count: int, what: str) -> np.ndarray:
        dtype = self.number_type(type_id, what)
        start = self.skip(count * dtype.itemsize, what)
        if type_id == BOOL:
            flags = np.frombuffer(self.data, np.uint8, count, start)
            if count and flags.max() > 1:
                self.fail(f"{what} holds a truth value that is neither 0 nor 1")
            return flags.astype(bool)
        return np.frombuffer(self.data, dtype, count, start).copy()

    def strings(self, count: int, what: str) -> list[str]:
        # A vocabulary has hundreds of thousands of these, so the loop holds its state in locals.
        data, size, pos = self.data, self.size, self.pos
        unpack = struct.Struct("<Q").unpack_from
        texts = []
        for index in range(count):
            start = pos + 8
            if start > size:
                self.fail(f"{what} ends inside element {index} of {count}")
            (length,) = unpack(data, pos)
            pos = start + length
            if pos > size:
                self.fail(f"element {index} of {what} needs {length} bytes at offset {start}, beyond the file's end")
            try:
                texts.append(data[start:pos].decode())
            except UnicodeDecodeError:
                self.fail(f"element {index} of {what} at offset {start} is not UTF-8")
        self.pos = pos
        return texts

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            self.fail(f"general.alignment is {alignment!r}, not a power of two")
        return alignment

    def records(self, count: int) -> list[_Record]:
        records: dict[str, _Record] = {}
        for index in range(count):
            name = self.name(f"name of tensor {index}", most_bytes=MAX_NAME_BYTES)
            what = f"tensor {name!r}"
            if name in records:
                self.fail(f"{what} appears twice")
            n_dims = self.number("I", f"number of dimensions of {what}")
            if not 1 <= n_dims <= MAX_DIMS:
                self.fail(f"{what} has {n_dims} dimensions, not 1 to {MAX_DIMS}")
            dims = [self.number("q", f"dimension {axis} of {what}") for axis in range(n_dims)]
            if min(dims) < 1:
                self.fail(f"{what} has a dimension below 1: {dims}")
            type_id = self.number("I", f"type of {what}")
            offset = self.number("Q", f"offset of {what}")
            if type_id not in GGML_TYPES:
                self.fail(f"{what} has unknown type id {type_id}")
            records[name] = _Record(name, GGML_TYPES[type_id], tuple(reversed(dims)), offset)
        return list(records.values())

    def place(self, records: list[_Record], alignment: int) -> dict[str, GGUFTensor]:
        """Tensors by name, once none leaves the file or touches another."""
        base = -(-self.pos // alignment) * alignment
        for record in records:
            columns = record.shape[-1]
            if columns % record.block.elems:
                self.fail(
                    f"tensor {record.name!r} has rows of {columns} elements, "
                    f"not a multiple of {record.block.name}'s {record.block.elems}"
                )
            if record.offset % alignment:
                self.fail(f"tensor {record.name!r} has offset {record.offset}, not a multiple of {alignment}")
            if base + record.offset + record.nbytes > self.size:
                self.fail(
                    f"tensor {record.name!r} of shape {list(record.shape)} needs {record.nbytes} bytes "
                    f"at offset {base + record.offset}, but the file ends at {self.size}"
                )
        for before, after in pairwise(sorted(records, key=lambda record: record.offset)):
            if before.offset + before.nbytes > after.offset:
                self.fail(f"tensors {before.name!r} and {after.name!r} overlap")
        return {
            record.name: GGUFTensor(
                name=record.name,
                block=record.block,
                shape=record.shape,
                raw=np.frombuffer(self.data, np.uint8, record.nbytes, base + record.offset),
                path=self.path,
                mapping=self.data,
            )
            for record in records
        }


class _StoredValues(_Parser):
    """Leaves numbers in the width in which they are stored."""

    def value(self, type_id: int, what: str) -> Any:
        if type_id in (STRING, ARRAY):
            return super().value(type_id, what)
        return self.numbers(type_id, 1, what)[0]

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        value = metadata.get("general.alignment", np.uint32(DEFAULT_ALIGNMENT))
        return super().alignment({"general.alignment": value.item() if isinstance(value, np.generic) else value})


def stored_metadata(path: Path) -> dict[str, Any]:
    """A file's metadata with numbers as NumPy scalars, so that it can be written again as it is.

    Raises:
        CheckpointError: the file cannot be read or is malformed.
    """
    return dict(_open(path, _StoredValues).metadata)
