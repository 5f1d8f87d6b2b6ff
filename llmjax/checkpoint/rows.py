"""Some rows or columns of a stored matrix, presented as a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from llmjax.checkpoint.safetensors import SafetensorsTensor
from llmjax.checkpoint.stored_tensor import Derived
from llmjax.kernels.row_format import RowFormat
from llmjax.weights.packing import RowSource, RowStack
from llmjax.weights.rows import QuantizedRows


@dataclass(frozen=True, eq=False)
class RowsOf(Derived):
    """Some rows of a matrix, or elements of a vector, as a tensor of their own.

    Attributes:
        rows: intp [n], which.
    """

    rows: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.sources[0].shape[1:])

    @property
    def nbytes(self) -> int:
        return self.sources[0].nbytes * len(self.rows) // self.sources[0].shape[0]

    def row_source(self) -> RowSource | None:
        """Codes and scales of a quantized matrix."""
        source = self.sources[0].row_source()
        assert not isinstance(source, RowStack)
        return None if source is None else _ChosenRows(source, self.rows)

    def read(self, dtype: np.dtype) -> np.ndarray:
        (source,) = self.sources
        if isinstance(source, SafetensorsTensor):
            return source.taken(self.rows).read(dtype)
        return source.read(dtype)[self.rows]


@dataclass(frozen=True, eq=False)
class _ChosenRows:
    """Some rows of a quantized matrix (a `RowSource`)."""

    source: RowSource
    rows: np.ndarray  # intp [n]

    @property
    def format(self) -> RowFormat:
        return self.source.format

    @property
    def columns(self) -> np.ndarray | None:
        return self.source.columns

    @property
    def size_out(self) -> int:
        return len(self.rows)

    @property
    def row_step(self) -> int:
        return 1

    def quantized_rows(self, start: int, stop: int) -> QuantizedRows:
        chosen = self.rows[start:stop]
        # Rows that take turns with others are read with them, which is faster than one by one.
        runs = np.split(chosen, np.flatnonzero(~np.isin(np.diff(chosen), (1, 2))) + 1)
        return _joined([self._run(run) for run in runs])

    def _run(self, rows: np.ndarray) -> QuantizedRows:
        first = int(rows[0]) - int(rows[0]) % self.source.row_step
        found = self.source.quantized_rows(first, int(rows[-1]) + 1)
        return replace(found, **{name: array[rows - first] for name, array in _arrays(found).items()})


@dataclass(frozen=True, eq=False)
class ColumnsOf(Derived):
    """Some columns of a plain matrix.

    Attributes:
        columns: which.
    """

    columns: slice

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.sources[0].shape
        return rows, len(range(columns)[self.columns])

    @property
    def nbytes(self) -> int:
        return self.sources[0].nbytes * self.shape[1] // self.sources[0].shape[1]

    def read(self, dtype: np.dtype) -> np.ndarray:
        return np.ascontiguousarray(self.sources[0].read(dtype)[:, self.columns])


def _arrays(rows: QuantizedRows) -> dict[str, Any]:
    found = {field.name: getattr(rows, field.name) for field in fields(rows)}
    return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}


def _joined(parts: Sequence[QuantizedRows]) -> QuantizedRows:
    if len(parts) == 1:
        return parts[0]
    arrays = [_arrays(part) for part in parts]
    joined: dict[str, Any] = {name: np.concatenate([part[name] for part in arrays]) for name in arrays[0]}
    return replace(parts[0], **joined)
