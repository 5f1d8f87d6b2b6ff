"""Token embedding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.linear import take_rows
from llmjax.models.layers.parameter import parameter


class Embedding(nnx.Module):
    """Rows of the vocabulary matrix [V, D], cast to the activations' dtype and scaled.

    Args:
        scale: multiplies the rows; rounded to the activations' dtype first, as Gemma was trained.
    """

    def __init__(
        self, vocab_size: int, size: int, *, scale: float, dtype: jnp.dtype, activation_dtype: jnp.dtype
    ) -> None:
        self.weight = parameter((vocab_size, size), dtype, axes=("vocab", "hidden"))
        self.scale = scale
        self.activation_dtype = activation_dtype

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """i32 [T] to [T, D]; ids outside the vocabulary (padding) read some row."""
        rows = take_rows(self.weight.get_value(), tokens).astype(self.activation_dtype)
        return rows if self.scale == 1 else rows * jnp.asarray(self.scale, self.activation_dtype)
