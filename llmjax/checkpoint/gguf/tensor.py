"""A tensor of a GGUF file, as a view of the mapped file."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llmjax.errors import CheckpointError
from llmjax.kernels.row_format import RowFormat
from llmjax.weights.ggml.types import BlockType, dequantize
from llmjax.weights.rows import QuantizedRows


@dataclass(frozen=True, eq=False)
class GGUFTensor:
    """A tensor as a view of the mapped file.

    Attributes:
        name: as in the file, for example ``blk.0.attn_q.weight``.
        block: stored type.
        shape: outermost dimension first, as in torch (a linear layer is [out, in]).
        raw: uint8 [nbytes], a view of the mapped file.
        path: the file, for messages.
        mapping: the mapped file.
    """

    name: str
    block: BlockType
    shape: tuple[int, ...]
    raw: np.ndarray
    path: Path
    mapping: mmap.mmap

    @property
    def type_name(self) -> str:
        return self.block.name

    @property
    def nbytes(self) -> int:
        return self.raw.nbytes

    def read(self, dtype: np.dtype, *, row_order: np.ndarray | None = None) -> np.ndarray:
        """The values as `dtype`, in `shape`; of the rows in ``row_order`` alone if there is one. See `dequantize`.

        Raises:
            CheckpointError: the stored type cannot be read.
        """
        row_bytes = self.shape[-1] // self.block.elems * self.block.nbytes
        rows = self.raw.reshape(-1, row_bytes)
        try:
            values = dequantize(rows, self.block, dtype, row_order=row_order)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: tensor {self.name!r}: {error}") from None
        return values.reshape(self.shape if row_order is None else (len(row_order), *self.shape[1:]))

    def take_rows(self, rows: slice | np.ndarray) -> np.ndarray:
        """A copy of some rows of a matrix; the file's pages are released, since they will not be read again.

        Args:
            rows: a slice, or int [n].

        Returns:
            uint8 [n, bytes of a row].
        """
        if isinstance(rows, slice):
            with self.rows_in_place(rows) as stored:
                return stored.copy()
        stored = self.raw.reshape(self.shape[0], -1)
        taken = stored[rows]
        self._give_back(stored[rows.min() : rows.max() + 1])
        return taken

    @contextmanager
    def rows_in_place(self, rows: slice) -> Iterator[np.ndarray]:
        """Rows of a matrix as in `take_rows`, but without a copy; the file's pages are released at the end."""
        stored = self.raw.reshape(self.shape[0], -1)[rows]
        yield stored
        self._give_back(stored)

    def _give_back(self, part: np.ndarray) -> None:
        first = part.ctypes.data - np.frombuffer(self.mapping, np.uint8).ctypes.data
        start = first // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):  # else the system takes them back when it needs memory
            self.mapping.madvise(mmap.MADV_DONTNEED, start, first + part.nbytes - start)

    def row_slice(self, start: int, stop: int) -> GGUFTensor:
        """Rows `start` to `stop` (elements, if it is a vector) as a tensor, without a copy.

        Raises:
            CheckpointError: a vector is stored in blocks, which cannot be cut anywhere.
        """
        if len(self.shape) == 1 and self.block.elems > 1:
            raise CheckpointError(f"{self.path}: tensor {self.name!r} is a vector in blocks of {self.block.elems}")
        row_bytes = self.nbytes // self.shape[0]
        raw = self.raw[start * row_bytes : stop * row_bytes]
        return replace(self, shape=(stop - start, *self.shape[1:]), raw=raw)

    def row_source(self, row_order: np.ndarray | None = None, columns: np.ndarray | None = None) -> GGUFRows | None:
        """The rows of a matrix; None if its type is plain numbers or cannot be read, or it is not a matrix.

        Args:
            row_order, columns: see `GGUFRows`.
        """
        form = self.block.row_format(self.shape[-1]) if len(self.shape) == 2 else None
        return None if form is None else GGUFRows(self, form, row_order, columns)


@dataclass(frozen=True, eq=False)
class GGUFRows:
    """Rows of a quantized tensor, split into codes and scales when they are packed for a device (a `RowSource`).

    Attributes:
        tensor: a matrix of a quantized type.
        format: format of each row.
        row_order: int [rows]; row i is stored row ``row_order[i]``. None: all in the stored order.
        columns: as in `RowSource`.
    """

    tensor: GGUFTensor
    format: RowFormat
    row_order: np.ndarray | None = None
    columns: np.ndarray | None = None
    row_step: int = 1

    @property
    def size_out(self) -> int:
        return self.tensor.shape[0] if self.row_order is None else len(self.row_order)

    def quantized_rows(self, start: int, stop: int) -> QuantizedRows:
        """Rows `start` to `stop`.

        Raises:
            CheckpointError: a scale or minimum is infinite or not a number.
        """
        rows = self.tensor.block.quantized_rows(self._stored(start, stop), self.format)
        self._check(rows.finite)
        return rows

    @property
    def packs(self) -> bool:
        """Whether `fill` can be called; see `BlockType.packs`."""
        return self.tensor.block.packs

    def fill(self, start: int, stop: int, words: np.ndarray) -> None:
        """Packs rows `start` to `stop` (see ``llmjax.weights.packing.PackedRows``).

        Raises:
            CheckpointError: a scale or minimum is infinite or not a number.
        """
        rows = slice(start, stop)
        stored = self.tensor.rows_in_place(rows) if self.row_order is None else nullcontext(self._stored(start, stop))
        with stored as raw:
            finite = self.tensor.block.pack(raw, self.format, words)
        self._check(finite)

    def _stored(self, start: int, stop: int) -> np.ndarray:
        return self.tensor.take_rows(slice(start, stop) if self.row_order is None else self.row_order[start:stop])

    def _check(self, finite: bool) -> None:
        tensor = self.tensor
        if not finite:
            raise CheckpointError(f"{tensor.path}: tensor {tensor.name!r} has scales that are infinite or not a number")
