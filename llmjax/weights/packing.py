"""Packs quantized rows into a `QTensor`, tile by tile, so that only a few MB are needed beside the result."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeGuard, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.cpu.cores import usable_cores
from llmjax.kernels.qtensor import QTensor
from llmjax.kernels.row_format import RowFormat
from llmjax.kernels.sharding import on_devices
from llmjax.weights.memory import aligned_empty
from llmjax.weights.rows import QuantizedRows, numpy_threads

Empty = Callable[[tuple[int, ...], np.dtype], np.ndarray]  # makes an array of a shape and dtype
BLOCK = 1 << 18  # weights that a thread packs at a time, so that codes and records stay in the L2 cache


class RowSource(Protocol):
    """A quantized matrix whose rows are unpacked when they are asked for."""

    @property
    def format(self) -> RowFormat:
        """The format of each row."""

    @property
    def columns(self) -> np.ndarray | None:
        """i32 [in], the logical index of each stored column; None: they are in order."""

    @property
    def size_out(self) -> int:
        """The number of rows."""

    @property
    def row_step(self) -> int:
        """`quantized_rows` accepts only a start that is a multiple of this."""

    def quantized_rows(self, start: int, stop: int) -> QuantizedRows:
        """Rows `start` to `stop`; may be called from several threads."""


@runtime_checkable
class PackedRows(RowSource, Protocol):
    """A row source that may pack its rows itself."""

    @property
    def packs(self) -> bool:
        """Whether it packs its rows itself."""

    def fill(self, start: int, stop: int, words: np.ndarray) -> None:
        """Packs rows `start` to `stop` into whole tiles, u32 [tiles, words of a record, tile], padded with zeros.

        May be called from several threads.
        """


@dataclass(frozen=True, eq=False)
class RowStack:
    """Quantized matrices of one shape and format, stacked.

    Attributes:
        count: number of matrices.
        matrix: makes one of them; called for one after the other, so that only one needs memory at a time.
    """

    count: int
    matrix: Callable[[int], RowSource]

    @cached_property
    def first(self) -> RowSource:
        return self.matrix(0)

    @property
    def format(self) -> RowFormat:
        """The format of each row."""
        return self.first.format

    @property
    def size_out(self) -> int:
        """The number of rows of each matrix."""
        return self.first.size_out

    @property
    def columns(self) -> np.ndarray | None:
        """i32 [count, in], see `RowSource`; None: the columns of all matrices are in order."""
        found = [self.matrix(i).columns for i in range(self.count)]
        if all(columns is None for columns in found):
            return None
        in_order = np.arange(self.format.size_in)
        return np.stack([in_order if columns is None else columns for columns in found])


def pack(source: RowSource | RowStack, *, tile: int, empty: Empty = aligned_empty) -> np.ndarray:
    """Packs a matrix or a stack into words.

    Args:
        source: the rows.
        tile: number of rows with interleaved words; the last tile is padded with zeros.
        empty: allocates an array.

    Returns:
        u32 [tiles, words of a record, tile]; for a stack [count, tiles, words of a record, tile].
    """
    words = empty(words_shape(source, tile=tile), np.dtype(np.uint32))
    one = source.first if isinstance(source, RowStack) else source
    with ThreadPoolExecutor(usable_cores() if _packs(one) else numpy_threads()) as threads:
        if not isinstance(source, RowStack):
            _fill(source, words, threads)
            return words
        for index in range(source.count):
            _fill(source.matrix(index), words[index], threads)
    return words


def _packs(source: RowSource) -> TypeGuard[PackedRows]:
    return isinstance(source, PackedRows) and source.packs


def words_shape(source: RowSource | RowStack, *, tile: int) -> tuple[int, ...]:
    """The shape of the result of `pack` for a matrix or a stack."""
    outer = (source.count,) if isinstance(source, RowStack) else ()
    return (*outer, -(-source.size_out // tile), source.format.num_words, tile)


def _fill(source: RowSource, words: np.ndarray, threads: ThreadPoolExecutor) -> None:
    tile, size_out = words.shape[-1], source.size_out
    unit = int(np.lcm(tile, source.row_step))
    step = unit * max(1, BLOCK // (unit * source.format.size_in))

    def fill(start: int) -> None:
        stop = min(start + step, size_out)
        first, last = start // tile, -(-stop // tile)
        if _packs(source):
            source.fill(start, stop, words[first:last])
            return
        records = np.zeros(((last - first) * tile, words.shape[1]), np.uint32)
        source.quantized_rows(start, stop).write(records[: stop - start])
        words[first:last] = records.reshape(last - first, tile, -1).swapaxes(1, 2)

    list(threads.map(fill, range(0, size_out, step)))


def put(
    source: RowSource | RowStack, words: np.ndarray, *, dtype: jnp.dtype, activations: str, device: jax.Device
) -> QTensor:
    """Puts a matrix or stack on a device.

    Args:
        words: the result of `pack`.
        dtype, activations: see `QTensor`.
    """
    columns = source.columns
    return QTensor(
        words=on_devices(words, device),
        columns=None if columns is None else on_devices(columns.astype(np.int32), device),
        format=source.format,
        size_out=source.size_out,
        dtype=jnp.dtype(dtype),
        activations=activations,
    )
