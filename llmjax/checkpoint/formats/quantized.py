"""The common part of all quantized safetensors formats: settings, and weights that consist of several tensors.

A format's planes (the stored arrays of one linear layer) return rows of codes, scales and zero points, and describe in
a `Layout` how these become `QuantizedRows`. `QuantizedRows.dequantize` defines the weights that they stand for.
A `LayerReader` finds the planes of a layer, a `LayerWriter` makes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np

from llmjax.checkpoint.formats.layout import Layout, Piece, StoredRows
from llmjax.checkpoint.safetensors import SafetensorsTensor
from llmjax.errors import CheckpointError, ConfigError
from llmjax.kernels.row_format import RowFormat
from llmjax.weights.packing import RowSource
from llmjax.weights.rows import FLOATS, QuantizedRows
from llmjax.weights.uniform import Float8Scheme, IntegerScheme

logger = logging.getLogger(__name__)

T = TypeVar("T")
SavedScheme = IntegerScheme | Float8Scheme
I32 = np.dtype("<i4")

MAX_SIZE = (1 << 31) - 1  # limit for rows, columns and groups
TILE = 1 << 17  # weights dequantized at a time: they and their temporaries stay in the cache
SCALE_TYPES = ("F64", "F32", "F16", "BF16", "F8_E8M0")


@dataclass(frozen=True)
class QuantSettings:
    """A JSON object of settings.

    Attributes:
        where: file and key that hold it, for messages.
        values: the object.
    """

    where: str
    values: Mapping[str, Any]

    def fail(self, problem: str, key: str) -> NoReturn:
        raise CheckpointError(f"{self.where}: {key} {problem}")

    def value(self, key: str) -> Any:
        """The value of a key, or None."""
        return self.values.get(key)

    def _typed(self, key: str, kind: type[T], what: str, default: T | None) -> T:
        value = self.values.get(key)
        if value is None:
            if default is None:
                self.fail("is missing", key)
            return default
        if type(value) is not kind:
            self.fail(f"is {str(value)[:60]!r}, not {what}", key)
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self._typed(key, bool, "true or false", default)

    def text(self, key: str, default: str | None = None) -> str:
        return self._typed(key, str, "a string", default).lower()

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> str:
        value = self.text(key, default)
        if value not in choices:
            self.fail(f"is {value[:60]!r}; supported are {', '.join(choices)}", key)
        return value

    def integer(self, *keys: str, choices: Sequence[int] | None = None, default: int | None = None) -> int:
        """A whole number under the first of `keys` (synonyms) that is there."""
        key = next((key for key in keys if self.values.get(key) is not None), keys[0])
        value = self._typed(key, int, "a whole number", default)
        if abs(value) > MAX_SIZE:
            self.fail(f"is {str(value)[:60]}, out of any range", key)
        if choices is not None and value not in choices:
            self.fail(f"is {value}; supported are {', '.join(map(str, choices))}", key)
        return value

    def group_size(self, *keys: str) -> int:
        """Columns that share a scale; -1: all of a row."""
        value = self.integer(*keys)
        if value != -1 and value < 1:
            self.fail(f"is {value}, neither -1 nor a number of columns", keys[0])
        return value

    def sizes(self, key: str) -> tuple[int, int]:
        """A value with numbers of rows and columns."""
        value = self.values.get(key)
        if (
            not isinstance(value, list)
            or len(value) != 2
            or not all(type(size) is int and 0 < size <= MAX_SIZE for size in value)
        ):
            self.fail(f"is {str(value)[:60]}, not two sizes", key)
        return value[0], value[1]

    def child(self, key: str) -> QuantSettings | None:
        """An object within the object; None if it is not there."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(f"is {str(value)[:60]!r}, not an object", key)
        return replace(self, where=f"{self.where}.{key}", values=value)


class Planes(Protocol):
    """The stored arrays of a linear layer, in one format."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape, (out, in)."""

    @property
    def layout(self) -> Layout:
        """The layout of the rows."""

    @property
    def row_step(self) -> int:
        """`rows` accepts only a start that is a multiple of this."""

    def rows(self, start: int, stop: int) -> StoredRows:
        """Output rows `start` to `stop`, unpacked; may be called from several threads."""


@dataclass(frozen=True, eq=False)
class PartOfPlanes:
    """Rows `start` to `stop` of planes, as `Planes`."""

    whole: Planes
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.whole.shape[1]

    @property
    def layout(self) -> Layout:
        return self.whole.layout

    @property
    def row_step(self) -> int:
        return self.whole.row_step

    def rows(self, start: int, stop: int) -> StoredRows:
        return self.whole.rows(self.start + start, self.start + stop)


@dataclass(frozen=True, eq=False)
class PlaneRows:
    """A layer whose rows fit records (a `RowSource`)."""

    planes: Planes
    piece: Piece

    @property
    def format(self) -> RowFormat:
        return self.piece.format

    @property
    def columns(self) -> np.ndarray | None:
        return self.piece.columns

    @property
    def size_out(self) -> int:
        return self.planes.shape[0]

    @property
    def row_step(self) -> int:
        return self.planes.row_step

    def quantized_rows(self, start: int, stop: int) -> QuantizedRows:
        return self.piece.rows(self.planes.rows(start, stop))


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantized weight under its plain name (a `StoredTensor`).

    Attributes:
        name: Hugging Face name, ending in ``.weight``.
        type_name: name of the type, such as ``GPTQ-4``.
        planes: the stored arrays.
        nbytes: stored bytes, everything included.
        experts: if not 0, the rows belong to this number of matrices: the shape is [experts, out, in].
    """

    name: str
    type_name: str
    planes: Planes
    nbytes: int
    experts: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.planes.shape
        return (self.experts, rows // self.experts, columns) if self.experts else (rows, columns)

    def matrix(self, index: int, rows: slice, name: str) -> QuantizedTensor:
        """See `StoredStack`."""
        each = self.shape[1]
        part = PartOfPlanes(self.planes, index * each + rows.start, index * each + rows.stop)
        nbytes = self.nbytes * (part.stop - part.start) // self.planes.shape[0]
        return replace(self, name=name, planes=part, nbytes=nbytes, experts=0)

    def row_source(self) -> RowSource | None:
        """The matrix in quantized form; None, with a warning, if it has to be dequantized."""
        problem = "a stack that is not taken apart" if self.experts else self.planes.layout.problem
        if problem:
            logger.warning("tensor %r of type %s is dequantized: %s", self.name, self.type_name, problem)
            return None
        return PlaneRows(self.planes, self.planes.layout.pieces[0])

    def read(self, dtype: np.dtype) -> np.ndarray:
        """The weights, computed in f32 and rounded to nearest even if `dtype` is narrower.

        Raises:
            CheckpointError: `dtype` is not a float type.
        """
        dtype = np.dtype(dtype)
        if dtype.kind in "iub":
            raise CheckpointError(f"tensor {self.name!r} of type {self.type_name} cannot be read as {dtype}")
        rows, columns = self.planes.shape
        result = np.empty((rows, columns), dtype)
        unit = self.planes.row_step
        step = unit * max(1, TILE // (unit * columns))
        scratch = None if dtype == np.float32 else np.empty((min(step, rows), columns), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # what exceeds f16 becomes inf, as anywhere
            for start in range(0, rows, step):
                target = result[start : start + step]
                tile = target if scratch is None else scratch[: len(target)]
                stored = self.planes.rows(start, start + len(target))
                for piece in self.planes.layout.pieces:
                    piece.dequantize(stored, tile)
                if scratch is not None:
                    target[...] = tile
        return result.reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Module:
    """The stored tensors of one layer.

    Attributes:
        name: name of the module, for example ``model.layers.0.mlp.up_proj``.
        parts: tensors by the ending of their names, for example ``.qweight``.
        path: a file or folder, for messages.
    """

    name: str
    parts: Mapping[str, SafetensorsTensor]
    path: Path

    def fail(self, problem: str, part: str = "") -> NoReturn:
        path = self.parts[part].path if part in self.parts else self.path
        raise CheckpointError(f"{path}: tensor {self.name + part!r} {problem}")

    def array(self, part: str, *types: str, dims: int | None = None) -> np.ndarray:
        """The stored array, after checking that it is there, not empty, of one of `types` and has `dims` dimensions."""
        if part not in self.parts:
            self.fail("is missing", part)
        tensor = self.parts[part]
        if tensor.type_name not in types:
            self.fail(f"is of type {tensor.type_name}, not {' or '.join(sorted(types))}", part)
        if 0 in tensor.shape:
            self.fail(f"is empty: its shape is {list(tensor.shape)}", part)
        if dims is not None and len(tensor.shape) != dims:
            self.fail(f"has shape {list(tensor.shape)}, not {dims} dimensions", part)
        return tensor.stored

    def scales(self, part: str, *, dims: int | None = None) -> np.ndarray:
        """`array` for floating-point scales, which must all be finite, also in float32."""
        array = self.array(part, *SCALE_TYPES, dims=dims)
        if array.dtype not in FLOATS.values():
            with np.errstate(over="ignore"):
                array = array.astype(np.float32)
        self.check_finite(part, array)
        return array

    def check_finite(self, part: str, scales: np.ndarray) -> None:
        """Refuses scales that weights cannot be multiplied with; `part` is what they were made from."""
        if not np.isfinite(scales).all():
            self.fail("holds scales that are infinite or not a number", part)

    def quantized(
        self, type_name: str, planes: Planes, *, ending: str = ".weight", experts: int = 0
    ) -> QuantizedTensor:
        """The weight that the parts form; its name is the module's name and `ending`."""
        nbytes = sum(tensor.nbytes for tensor in self.parts.values())
        return QuantizedTensor(self.name + ending, type_name, planes, nbytes, experts)

    def expect(self, part: str, shape: tuple[int, ...], why: str) -> None:
        found = self.parts[part].shape
        if found != shape:
            self.fail(f"has shape {list(found)}, but {why} needs {list(shape)}", part)


class LayerReader(Protocol):
    """A way of storing linear layers in several tensors each."""

    @property
    def name(self) -> str:
        """The name in messages, such as ``GPTQ``."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The endings of tensors' names after the module's name; the longest one that matches counts."""

    @property
    def plain_part(self) -> str:
        """The ending of a plain weight's name after the module's name: ``.weight``."""

    def is_quantized(self, module: Module) -> bool:
        """Whether a module is stored in this format; else its weight is plain."""

    def open(self, module: Module) -> QuantizedTensor:
        """The weight of a module that is stored in this format.

        Raises:
            CheckpointError: tensors are missing, do not fit each other or contradict the configuration.
        """


def quantized_tensors(
    stored: Mapping[str, SafetensorsTensor], how: LayerReader, path: Path
) -> dict[str, SafetensorsTensor | QuantizedTensor]:
    """Tensors under the names that they would have unquantized.

    Args:
        stored: the tensors in the files.
        how: the format of quantized layers; other tensors stay as they are.
        path: the checkpoint, for messages.

    Raises:
        CheckpointError: nothing is stored in the format, or a layer is malformed.
    """
    parts: dict[str, dict[str, SafetensorsTensor]] = {}
    tensors: dict[str, SafetensorsTensor | QuantizedTensor] = {}
    endings = sorted(how.parts, key=len, reverse=True)
    for name, tensor in stored.items():
        ending = next((ending for ending in endings if name.endswith(ending)), None)
        if ending is None:
            tensors[name] = tensor
        else:
            parts.setdefault(name.removesuffix(ending), {})[ending] = tensor
    found = 0
    for name, own in parts.items():
        module = Module(name, own, path)
        if how.is_quantized(module):
            found += 1
            weight: SafetensorsTensor | QuantizedTensor = how.open(module)
        elif how.plain_part in own:
            weight = own.pop(how.plain_part)
        else:
            module.fail(f"belongs to no layer that {how.name} stores", next(iter(own)))
        if not isinstance(weight, QuantizedTensor) and own:
            module.fail(f"is of no use to a layer that {how.name} does not store", next(iter(own)))
        if weight.name in tensors:
            raise CheckpointError(f"{path}: tensor {weight.name!r} is there twice, once as {how.name} stores it")
        tensors[weight.name] = weight
    if not found:
        raise CheckpointError(f"{path}: is declared to be quantized with {how.name}, but no tensor is stored so")
    return tensors


@dataclass(frozen=True, eq=False)
class Part:
    """One of the tensors that a layer is stored in.

    Attributes:
        shape, dtype: shape and dtype of the tensor.
        make: makes the values from all rows of the layer.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[QuantizedRows], np.ndarray]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class LayerWriter(Protocol):
    """A way of storing linear layers in several tensors each."""

    @property
    def name(self) -> str:
        """The ``quant_method`` of the format."""

    def kept(self, scheme: SavedScheme, dtype: np.dtype) -> SavedScheme:
        """The scheme with scales of the format's type.

        Args:
            dtype: type in which engines run the model: float32, float16 or bfloat16.

        Raises:
            ConfigError: the format cannot hold the scheme.
        """

    def parts(self, scheme: SavedScheme, shape: tuple[int, int]) -> Mapping[str, Part]:
        """The tensors of a layer, by the ending after the module's name.

        Args:
            scheme: a result of `kept`.
            shape: shape of the layer, (out, in).

        Raises:
            ConfigError: the shape does not suit the scheme; the message does not name the layer.
        """

    def settings(
        self, layers: Mapping[str, SavedScheme], ignored: Sequence[str], *, never: Sequence[str] = ("lm_head",)
    ) -> dict[str, Any]:
        """``quantization_config`` of config.json.

        Args:
            layers: schemes of the quantized modules by name.
            ignored: names of the linear modules that are not quantized.
            never: those of them that readers always expect to be plain: head, norms, convolutions, routers of experts.

        Raises:
            ConfigError: the format cannot express this.
        """


def unsigned(codes: np.ndarray) -> np.ndarray:
    """Codes or zero points of a record as uint8: two's complement of 8 bits has 128 added."""
    return codes if codes.dtype == np.uint8 else codes.view(np.uint8) ^ np.uint8(128)


def check_groups(scheme: IntegerScheme, inputs: int) -> None:
    """Refuses groups that do not fill rows.

    Raises:
        ConfigError: the group size does not fit; the message names sizes that do.
    """
    if scheme.group_size and inputs % scheme.group_size:
        fitting = [str(size) for size in (256, 128, 96, 64, 48, 32, 16) if inputs % size == 0]
        hint = f"; --group-size {' or '.join(fitting)} would do" if fitting else ""
        raise ConfigError(f"{inputs} columns are not a multiple of {scheme.name}'s groups of {scheme.group_size}{hint}")
