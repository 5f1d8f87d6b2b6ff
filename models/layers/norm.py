"""RMS norm in its two flavours."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """``x / rms(x) * weight`` over the last axis; the statistics are f32.

    Args:
        size: length of the last axis.
        eps: added to the mean square.
        plus_one: the weight is stored less one and the product is taken in f32 (Gemma); otherwise ``x / rms(x)`` is
            rounded to x's dtype first (Llama and the rest).
    """

    def __init__(self, size: int, *, eps: float, plus_one: bool = False) -> None:
        # A few kilobytes: f32 keeps them exact whatever the matrices' dtype is.
        self.weight = nnx.Param(jax.ShapeDtypeStruct((size,), jnp.float32))
        self.eps = eps
        self.plus_one = plus_one

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.weight.get_value()
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        if self.plus_one:
            return (normed * (1 + weight.astype(jnp.float32))).astype(x.dtype)
        return normed.astype(x.dtype) * weight.astype(x.dtype)
