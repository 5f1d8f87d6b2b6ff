"""Norms."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.norm import Norm, rms_norm
from llmjax.models.layers.parameter import parameter


@dataclass(frozen=True)
class RMS:
    """Root mean square norm; see ``llmjax.kernels.norm.Norm``."""

    eps: float
    plus_one: bool = False  # weights are stored as w, applied as 1 + w, product in f32 (Gemma)

    def build(self, size: int) -> RMSNorm:
        """Over a last axis of ``size`` entries."""
        return RMSNorm(self, size)


class RMSNorm(nnx.Module):
    """``x / rms(x) * weight``."""

    def __init__(self, spec: RMS, size: int) -> None:
        self.spec = spec
        # A few kilobytes: f32 keeps them exact whatever the matrices' dtype is.
        self.weight = parameter((size,), jnp.float32, axes=(None,))

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.norm)

    @property
    def norm(self) -> Norm:
        """As kernels take it."""
        return Norm(self.weight.get_value(), self.spec.eps, self.spec.plus_one)
