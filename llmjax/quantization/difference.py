"""How far quantized weights are from what they were."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Difference:
    """Sums of squares over the same elements, so that those of several tensors add up.

    Attributes:
        error: of new less old.
        total: of the old.
    """

    error: float = 0.0
    total: float = 0.0

    @classmethod
    def between(cls, new: np.ndarray, old: np.ndarray) -> Difference:
        """Of two arrays of one shape."""
        old = np.asarray(old, np.float32)
        gap = np.asarray(new, np.float32) - old
        return cls(float(np.vdot(gap, gap)), float(np.vdot(old, old)))

    def __add__(self, other: Difference) -> Difference:
        return Difference(self.error + other.error, self.total + other.total)

    @property
    def relative(self) -> float:
        """Norm of the error over the norm of the old; 0 if both are."""
        if not self.error:
            return 0.0
        return math.sqrt(self.error / self.total) if self.total else math.inf
