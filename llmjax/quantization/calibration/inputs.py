"""What is kept of a layer's inputs: sums over all tokens, so that memory does not grow with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Means over the tokens that a projection was given.

    Attributes:
        gram: f64 [in, in], of x xᵀ: half the Hessian of the squared error of outputs.
        magnitude: f64 [in], of |x|.
    """

    gram: np.ndarray
    magnitude: np.ndarray

    @classmethod
    def of(cls, inputs: Iterable[jax.Array]) -> InputStatistics:
        """Sums up inputs, float [tokens, in] each."""
        tokens, sums = 0, None
        for x in inputs:
            tokens += len(x)
            added = _sums(x)
            sums = added if sums is None else tuple(map(jnp.add, sums, added))
        assert sums is not None
        gram, magnitude = (np.asarray(total, np.float64) / tokens for total in sums)
        return cls(gram, magnitude)

    def divided(self, scales: np.ndarray) -> InputStatistics:
        """Of inputs whose channels were divided by scales [in]."""
        return InputStatistics(self.gram / np.outer(scales, scales), self.magnitude / scales)

    def energy(self, weights: np.ndarray) -> float:
        """Mean square of the length of outputs, with weights f32 [out, in]."""
        # Rounding may leave less than nothing of a tiny sum.
        return max(0.0, float(np.vdot(weights @ self._gram, weights)))

    @cached_property
    def _gram(self) -> np.ndarray:
        return self.gram.astype(np.float32)


@jax.jit
def _sums(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = x.astype(jnp.float32)
    gram = jax.lax.dot_general(wide, wide, (((0,), (0,)), ((), ())), precision="highest")
    return gram, jnp.abs(wide).sum(axis=0)
