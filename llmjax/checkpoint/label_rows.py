"""The labels' matrix of a generating model whose labels are tokens: rows of its head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmjax.checkpoint.rows import RowsOf
from llmjax.checkpoint.stored_tensor import Derived, StoredTensor

LABELS = "head.0.dense.weight"


@dataclass(frozen=True, eq=False)
class LabelRows(Derived):
    """Rows of a head, or the second row minus the first.

    Attributes:
        sources: rows of the head, a `RowsOf`.
        difference: see ``llmjax.models.TokenLabels``.
        scale: factor of the logits.
    """

    difference: bool
    scale: float = 1.0

    @classmethod
    def of(cls, head: StoredTensor, tokens: Sequence[int], *, difference: bool, scale: float) -> LabelRows:
        """The rows of some tokens in a head [vocabulary, D]."""
        return cls(LABELS, (RowsOf(LABELS, (head,), np.asarray(tokens, np.intp)),), difference, scale)

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, *self.sources[0].shape[1:]) if self.difference else self.sources[0].shape

    def read(self, dtype: np.dtype) -> np.ndarray:
        rows = self.sources[0].read(np.dtype(np.float32))
        found = rows[1:] - rows[:1] if self.difference else rows
        return (found * np.float32(self.scale)).astype(dtype)
