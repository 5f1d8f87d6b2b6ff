"""The images among a step's tokens, as a decoder takes them in."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seen:
    """What a step's tokens have beside their ids and places in the text. T tokens."""

    axes: jax.Array | None = None  # i32 [3, T], positions on three axes; None: tokens have one
    places: jax.Array | None = (
        None  # i32 [T], rows that stand for tokens; negative: the token is embedded; None: all are
    )
    rows: jax.Array | None = None  # [1 + K, M, D], embeddings, and what is added after each of the first K layers
    last_key: jax.Array | None = None  # i32 [T], see ``RaggedBatch.last_key``

    def embedded(self, x: jax.Array) -> jax.Array:
        """The embeddings [T, D] with the rows that stand for tokens."""
        if self.places is None or self.rows is None:
            return x
        return jnp.where((self.places >= 0)[:, None], self.rows[0, self.places].astype(x.dtype), x)

    def looked_up(self) -> jax.Array | None:
        """The rows that tokens stand for, [T, E], of others some row; None: none does."""
        return None if self.places is None or self.rows is None else self.rows[0, jnp.maximum(self.places, 0)]

    def known(self, tokens: jax.Array, unknown: int) -> jax.Array:
        """The tokens [T] with ``unknown`` where rows stand for them."""
        return tokens if self.places is None else jnp.where(self.places >= 0, unknown, tokens)

    def added(self, x: jax.Array, layer: int) -> jax.Array:
        """The residual stream [T, D] after a layer, with what is added to it there."""
        if self.places is None or self.rows is None or layer + 1 >= len(self.rows):
            return x
        return x + jnp.where((self.places >= 0)[:, None], self.rows[layer + 1, self.places].astype(x.dtype), 0)
