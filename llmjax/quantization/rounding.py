"""Rounds weights to nearest, a few rows at a time, while they are loaded or saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llmjax.checkpoint.experts import ExpertStack
from llmjax.checkpoint.stored_tensor import StoredTensor
from llmjax.errors import CheckpointError
from llmjax.kernels.cpu.cores import usable_cores
from llmjax.kernels.row_format import RowFormat
from llmjax.quantization.report import Difference
from llmjax.weights.packing import RowSource, RowStack
from llmjax.weights.rows import FLOATS, QuantizedRows
from llmjax.weights.uniform import Float8Scheme, IntegerScheme, PackedScheme, UniformScheme


@dataclass(frozen=True, eq=False)
class FloatRows:
    """Reads rows of a stored matrix as floats, whatever its format is.

    Attributes:
        tensor: the matrix.
        whole: whether it is read at once even if it could be unpacked by rows.
    """

    tensor: StoredTensor
    whole: bool = False

    @cached_property
    def _quantized(self) -> RowSource | None:
        if self.whole:
            return None
        source = self.tensor.row_source()
        assert not isinstance(source, RowStack)
        return source

    @cached_property
    def _plain(self) -> np.ndarray:
        # A float type stays as stored, so that no wider copy exists.
        return self.tensor.read(FLOATS.get(self.tensor.type_name.lower(), FLOATS["f32"]))

    @property
    def row_step(self) -> int:
        """`read` accepts only a start that is a multiple of this."""
        return 1 if self._quantized is None else self._quantized.row_step

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop`: float [n, in]."""
        source = self._quantized
        if source is None:
            return self._plain[start:stop]
        rows = source.quantized_rows(start, stop)
        values = np.empty(rows.codes.shape, np.float32)
        rows.dequantize(values)
        if source.columns is None:
            return values
        ordered = np.empty_like(values)
        ordered[:, source.columns] = values
        return ordered


@dataclass(frozen=True, eq=False)
class InSituRows:
    """A `RowSource` that quantizes what it reads.

    Attributes:
        tensor: a matrix [out, in], already quantized or not.
        scheme: the scheme to quantize it with.
        whole: see `FloatRows`.
    """

    tensor: StoredTensor
    scheme: UniformScheme
    whole: bool = False
    columns: None = None

    @cached_property
    def format(self) -> RowFormat:
        return self.scheme.format(self.tensor.shape[1])

    @cached_property
    def _floats(self) -> FloatRows:
        return FloatRows(self.tensor, self.whole)

    @property
    def size_out(self) -> int:
        return self.tensor.shape[0]

    @property
    def row_step(self) -> int:
        return self._floats.row_step

    def quantized_rows(self, start: int, stop: int) -> QuantizedRows:
        """Rows `start` to `stop`.

        Raises:
            CheckpointError: a weight cannot be quantized with the scheme.
        """
        rows = self._floats.read(start, stop)
        with self._named():
            return self.scheme.quantize(rows)

    @property
    def packs(self) -> bool:
        """Whether `fill` can be called, because the scheme does it in C++."""
        return isinstance(self.scheme, PackedScheme) and self.scheme.packs

    def fill(self, start: int, stop: int, words: np.ndarray) -> None:
        """Packs rows `start` to `stop` (see ``llmjax.weights.packing.PackedRows``).

        Raises:
            CheckpointError: a weight cannot be quantized with the scheme.
        """
        assert isinstance(self.scheme, PackedScheme)
        rows = self._floats.read(start, stop)
        with self._named():
            self.scheme.fill(rows, words)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"tensor {self.tensor.name!r}: {error}") from None


def rows_in_situ(tensor: StoredTensor, scheme: UniformScheme) -> RowSource | RowStack:
    """A matrix, or a stack of experts matrix by matrix, quantized while it is read."""
    if not isinstance(tensor, ExpertStack):
        return InSituRows(tensor, scheme)
    matrices = tensor.sources
    # If the first one cannot be unpacked by rows, neither can the others.
    whole = any(matrix.row_source() is None for matrix in matrices)
    return RowStack(len(matrices), lambda i: InSituRows(matrices[i], scheme, whole))


BLOCK = 1 << 20  # weights that a thread quantizes at a time


@dataclass(frozen=True, eq=False)
class Result:
    """The result for a tensor.

    Attributes:
        name: Hugging Face name.
        value: its quantized rows, or plain numbers of its shape that replace it (a norm with a folded scale).
        difference: difference of quantized weights from the original.
    """

    name: str
    value: QuantizedRows | np.ndarray
    difference: Difference | None = None


def round_to_nearest(
    tensors: Mapping[str, StoredTensor], layers: Mapping[str, IntegerScheme | Float8Scheme]
) -> Iterator[Result]:
    """Quantizes matrices one after the other, blocks of rows in threads.

    Args:
        tensors: the tensors by Hugging Face name.
        layers: the scheme of each tensor to quantize.

    Raises:
        CheckpointError: a weight cannot be quantized with the scheme; the message names the tensor.
    """
    with ThreadPoolExecutor(usable_cores()) as pool:
        for name, scheme in layers.items():
            try:
                yield _rounded(name, tensors[name], scheme, pool)
            except CheckpointError as error:
                raise CheckpointError(f"tensor {name!r}: {error}") from None


def _rounded(name: str, tensor: StoredTensor, scheme: IntegerScheme | Float8Scheme, pool: ThreadPoolExecutor) -> Result:
    source = FloatRows(tensor)
    rows, columns = tensor.shape
    step = source.row_step * max(1, BLOCK // (source.row_step * columns))
    if isinstance(scheme, Float8Scheme) and scheme.per_tensor:
        step = rows

    def block(start: int) -> tuple[QuantizedRows, Difference]:
        weights = source.read(start, min(start + step, rows)).astype(np.float32, copy=False)
        quantized = scheme.quantize(weights)
        found = np.empty(weights.shape, np.float32)
        quantized.dequantize(found)
        return quantized, Difference.between(found, weights)

    blocks, differences = zip(*pool.map(block, range(0, rows, step)), strict=True)
    return Result(name, joined(blocks), sum(differences, Difference()))


def joined(blocks: tuple[QuantizedRows, ...]) -> QuantizedRows:
    """Concatenates blocks of rows of one format."""
    first = blocks[0]
    if len(blocks) == 1:
        return first
    zeros = (
        None if first.zeros is None else np.concatenate([block.zeros for block in blocks if block.zeros is not None])
    )
    return QuantizedRows(
        first.format,
        np.concatenate([block.codes for block in blocks]),
        np.concatenate([block.scales for block in blocks]),
        zeros=zeros,
    )
