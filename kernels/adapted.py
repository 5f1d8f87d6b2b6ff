"""Weights with adapters: what the adapters in the places of a device change of a matrix.

The matrices of all places lie side by side, see ``adapted_linear.py`` for products with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from llmjax.kernels.qtensor import QTensor
from llmjax.kernels.sharding import own_number, parts

NO_PLACE = 0  # of rows that are computed with the weights as they are; places count from 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Delta:
    """What adapters of rank r in S places change of a matrix [out, in].

    Of an embedding, whose rows are looked up, ``a`` is [vocabulary, S * r], and there are no vectors. Of a stack of E
    experts, ``a`` is [S, E, r, in] and ``b`` [S, E, r, out], and there are no vectors either.
    """

    a: jax.Array  # [S * r, in]
    b: jax.Array  # [S * r, out], in the type of ``a``
    vectors: jax.Array | None = None  # f32 [2 * S, out]: a bias of each place, then factors of the product, less one
    summed: str | None = field(default=None, metadata={"static": True})  # axis along which devices add products up

    def here(self, places: Places) -> Delta:
        """The changes as this device makes them: where devices add their products up, only one adds the biases."""
        if self.summed is None or self.vectors is None or parts(self.summed) == 1:
            return self
        is_bias = jnp.arange(len(self.vectors))[:, None] < places.count
        return replace(self, vectors=jnp.where(is_bias & (own_number(self.summed) != 0), 0, self.vectors))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Places:
    """Which rows are computed with the adapter of which place."""

    of: jax.Array  # i32 [T], or NO_PLACE; i32 []: that of every row, however many there are
    special: jax.Array  # i32 [S + 1], whether the adapter of a place has biases or factors of products

    @property
    def count(self) -> int:
        """S."""
        return int(self.special.shape[0]) - 1

    def over(self, rows: int) -> Places:
        """The places of each of ``rows`` rows, where one is that of every row."""
        return self if self.of.ndim else replace(self, of=jnp.broadcast_to(self.of, (rows,)))

    @property
    def chosen(self) -> jax.Array:
        """f32 [T, S]: 1 where a row has the adapter of a place."""
        return (self.of[:, None] == jnp.arange(1, self.count + 1)).astype(jnp.float32)

    def only_own(self, shrunk: jax.Array) -> jax.Array:
        """Products with all ``a``, [T, …, S * r], with zeros in place of those with other places'."""
        of = self.of.reshape(-1, *[1] * (shrunk.ndim - 1))
        own = of == jnp.arange(shrunk.shape[-1]) // (shrunk.shape[-1] // self.count) + 1
        return jnp.where(own, shrunk, 0)  # no product: rows that nobody looks at may hold anything


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """A weight [out, in] or a stack of them, and what adapters change of it."""

    weight: jax.Array | QTensor  # as it is
    delta: Delta | None
    places: Places
    head: Delta | None = None  # of a tied head, where the weight is the embedding

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return tuple(self.weight.shape)

    def at(self, of: jax.Array) -> Adapted:
        """The weight for other rows, i32 [N]."""
        return replace(self, places=replace(self.places, of=of))

    @property
    def as_head(self) -> Adapted:
        """The embedding as a tied head."""
        return replace(self, delta=self.head, head=None)


def as_it_is(weight: jax.Array | QTensor | Adapted) -> jax.Array | QTensor:
    """The weight without adapters."""
    return weight.weight if isinstance(weight, Adapted) else weight
