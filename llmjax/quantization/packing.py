"""Quantised rows into a `QTensor`, tile by tile, so that memory beyond the result stays within a few MB."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from kernels.qtensor import QTensor, RowFormat
from llmjax.quantization.rows import QuantizedRows

XLA_ALIGNMENT = 64  # bytes
BLOCK = 1 << 18  # weights packed at a time by a thread: codes and records stay in the L2 cache


class RowSource(Protocol):
    """A quantised matrix whose rows are unpacked when they are asked for."""

    @property
    def format(self) -> RowFormat:
        """Of each row."""

    @property
    def columns(self) -> np.ndarray | None:
        """i32 [in], the logical column of each stored one, or None if they are in order."""

    @property
    def size_out(self) -> int:
        """Rows."""

    @property
    def row_step(self) -> int:
        """`quantized_rows` may be asked only for rows that start at a multiple of this."""

    def quantized_rows(self, start: int, stop: int) -> QuantizedRows:
        """Rows `start` to `stop`; may be called from several threads."""


def pack(source: RowSource, *, tile: int) -> np.ndarray:
    """The words of a matrix.

    Args:
        source: its rows.
        tile: rows whose words are interleaved; the last tile is filled up with zeros.

    Returns:
        u32 [tiles, words of a record, tile].
    """
    form, size_out = source.format, source.size_out
    tiles = -(-size_out // tile)
    words = _aligned_words((tiles, form.num_words, tile))
    unit = int(np.lcm(tile, source.row_step))
    step = unit * max(1, BLOCK // (unit * form.size_in))

    def fill(start: int) -> None:
        stop = min(start + step, size_out)
        first, last = start // tile, -(-stop // tile)
        records = np.zeros(((last - first) * tile, form.num_words), np.uint32)
        source.quantized_rows(start, stop).write(records[: stop - start])
        words[first:last] = records.reshape(last - first, tile, -1).swapaxes(1, 2)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(fill, range(0, size_out, step)))
    return words


def _aligned_words(shape: tuple[int, ...]) -> np.ndarray:
    """u32 where XLA wants it on a CPU, which then takes the array as it is and copies nothing."""
    size = math.prod(shape)
    memory = np.empty(size + XLA_ALIGNMENT // 4, np.uint32)
    start = -memory.ctypes.data % XLA_ALIGNMENT // 4
    return memory[start : start + size].reshape(shape)


def put(source: RowSource, *, tile: int, dtype: jnp.dtype, activations: str, device: jax.Device) -> QTensor:
    """The matrix on a device.

    Args:
        tile: see `pack`.
        dtype, activations: see `QTensor`.
    """
    columns = None if source.columns is None else jax.device_put(source.columns.astype(np.int32), device)
    return QTensor(
        words=jax.device_put(pack(source, tile=tile), device),
        columns=columns,
        format=source.format,
        size_out=source.size_out,
        dtype=jnp.dtype(dtype),
        activations=activations,
    )
