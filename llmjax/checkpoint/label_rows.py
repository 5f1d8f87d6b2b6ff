"""The labels' matrix of a generating model whose labels are tokens: rows of its head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmjax.checkpoint.rows import RowsOf
from llmjax.checkpoint.stored_tensor import StoredTensor

LABELS = "head.0.dense.weight"


@dataclass(frozen=True, eq=False)
class LabelRows:
    """Rows of a head, or the second row minus the first (a `StoredTensor`).

    Attributes:
        source: the head, [vocabulary, D].
        tokens: ids of the tokens.
        difference: see ``llmjax.models.TokenLabels``.
        scale: factor of the logits.
    """

    source: StoredTensor
    tokens: tuple[int, ...]
    difference: bool
    scale: float = 1.0

    @property
    def name(self) -> str:
        return LABELS

    @property
    def shape(self) -> tuple[int, ...]:
        return (1 if self.difference else len(self.tokens), *self.source.shape[1:])

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    @property
    def type_name(self) -> str:
        return self.source.type_name

    def row_source(self) -> None:
        """Rows are read as plain numbers."""

    def read(self, dtype: np.dtype) -> np.ndarray:
        """The values; see `StoredTensor.read`."""
        rows = self._rows.read(np.dtype(np.float32))
        found = rows[1:] - rows[:1] if self.difference else rows
        return (found * np.float32(self.scale)).astype(dtype)

    @property
    def _rows(self) -> RowsOf:
        return RowsOf(LABELS, self.source, np.asarray(self.tokens, np.intp))
