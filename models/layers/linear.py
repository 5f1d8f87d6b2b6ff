"""A weight matrix with an optional bias."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.blocks import Projection
from llmjax.kernels.linear import linear


class Linear(nnx.Module):
    """``x @ weight.T + bias``; the weight is [out, in] as in Hugging Face checkpoints.

    Args:
        dtype: of the weight; the bias is f32.
    """

    def __init__(self, size_in: int, size_out: int, *, bias: bool, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jax.ShapeDtypeStruct((size_out, size_in), dtype))
        self.bias = nnx.Param(jax.ShapeDtypeStruct((size_out,), jnp.float32)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, in] to [T, out]."""
        return linear(x, self.weight.get_value(), None if self.bias is None else self.bias.get_value())

    @property
    def projection(self) -> Projection:
        """As kernels take it."""
        return Projection(self.weight.get_value(), None if self.bias is None else self.bias.get_value())
