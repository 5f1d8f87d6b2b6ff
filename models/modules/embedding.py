"""The modules of embeddings: of tokens, of learned positions and of a text's segments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.linear import take_rows
from llmjax.kernels.sharding import all_sum, own_number, parts
from llmjax.models.layers.embedding import LearnedPositions
from llmjax.models.modules.parameter import parameter


class Embedding(nnx.Module):
    """Embeds tokens by rows of the vocabulary matrix [V, D], cast to the activations' dtype and scaled.

    Args:
        scale: factor of the rows; rounded to the activations' dtype first, as in Gemma's training.
    """

    def __init__(
        self, vocab_size: int, size: int, *, scale: float, dtype: jnp.dtype, activation_dtype: jnp.dtype
    ) -> None:
        self.weight = parameter((vocab_size, size), dtype, axes=("vocab", "hidden"))
        self.scale = scale
        self.activation_dtype = activation_dtype

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """i32 [T] to [T, D]; ids outside the vocabulary (padding) read some row."""
        weight = self.weight.get_value()
        if parts("vocab") == 1:
            rows = take_rows(weight, tokens)
        else:  # a token's row is on one device; the others have zeros
            row = tokens - own_number("vocab") * weight.shape[0]
            is_here = (row >= 0) & (row < weight.shape[0])
            rows = all_sum(jnp.where(is_here[:, None], take_rows(weight, row), 0), "vocab")
        rows = rows.astype(self.activation_dtype)
        return rows if self.scale == 1 else rows * jnp.asarray(self.scale, self.activation_dtype)


class TypeEmbedding(nnx.Module):
    """Embeds the segments of a text by rows of a matrix [types, D] (BERT)."""

    def __init__(self, count: int, size: int, *, dtype: jnp.dtype) -> None:
        self.weight = parameter((count, size), dtype, axes=(None, None), plain=True)

    def __call__(self, types: jax.Array) -> jax.Array:
        """i32 [T] to [T, D] in the table's dtype."""
        return take_rows(self.weight.get_value(), types)


class Bias(nnx.Module):
    """What is added to the logits of a head whose matrix is the embedding, [V] (BERT)."""

    def __init__(self, count: int) -> None:
        self.bias = parameter((count,), jnp.float32, axes=("vocab",))


class PositionEmbedding(nnx.Module):
    """Embeds positions by rows of a matrix [offset + count, D]."""

    def __init__(self, spec: LearnedPositions, size: int, *, dtype: jnp.dtype) -> None:
        self.spec = spec
        self.weight = parameter((spec.offset + spec.count, size), dtype, axes=(None, None), plain=True)

    def __call__(self, positions: jax.Array) -> jax.Array:
        """i32 [T] to [T, D] in the table's dtype; positions out of range (padding) read some row."""
        spec = self.spec
        places = positions if not spec.first else jnp.maximum(positions - spec.first, 0)
        return take_rows(self.weight.get_value(), places + spec.offset)
