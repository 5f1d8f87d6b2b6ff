"""RMS norm as a module."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.norm import Norm, rms_norm


class RMSNorm(nnx.Module):
    """See ``llmjax.kernels.norm.Norm``.

    Args:
        size: length of the last axis.
    """

    def __init__(self, size: int, *, eps: float, plus_one: bool = False) -> None:
        # A few kilobytes: f32 keeps them exact whatever the matrices' dtype is.
        self.weight = nnx.Param(jax.ShapeDtypeStruct((size,), jnp.float32))
        self.eps = eps
        self.plus_one = plus_one

    @property
    def norm(self) -> Norm:
        """As kernels take it."""
        return Norm(self.weight.get_value(), self.eps, self.plus_one)

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.norm)
