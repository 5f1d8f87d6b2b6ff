"""The largest entries of each row, without sorting a vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 128  # entries


def top_entries(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Same as ``jax.lax.top_k``: values f32 [N, count] and indices i32 [N, count], largest first, lower index first
    among equals.

    Args:
        x: f32 [N, V], no NaN.
        count: 0 to V.
    """
    values, ids = lax.platform_dependent(
        x, cpu=lambda x: tuple(lax.top_k(x, count)), default=lambda x: top_by_blocks(x, count)
    )
    return values, ids


def top_by_blocks(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """``top_entries`` where ``lax.top_k`` sorts its whole input.

    The largest ``count`` entries lie in the ``count`` blocks with the largest maxima: were one of them in another
    block, each of those would hold an entry that goes before it. So only maxima and those blocks are sorted.
    """
    rows, size = x.shape
    blocks = -(-size // BLOCK)
    if blocks <= count:
        values, ids = lax.top_k(x, count)
        return values, ids
    padded = jnp.pad(x, ((0, 0), (0, blocks * BLOCK - size)), constant_values=-jnp.inf).reshape(rows, blocks, BLOCK)
    # An optimization barrier, or the maxima would be computed again for each comparison of the sort.
    maxima = lax.optimization_barrier(jnp.max(padded, axis=-1))
    chosen = jnp.sort(lax.top_k(maxima, count)[1], axis=-1)  # in the order of indices, for entries that are equal
    candidates = jnp.take_along_axis(padded, chosen[:, :, None], axis=1).reshape(rows, count * BLOCK)
    values, place = lax.top_k(candidates, count)
    block = jnp.take_along_axis(chosen, place // BLOCK, axis=-1)
    return values, (block * BLOCK + place % BLOCK).astype(jnp.int32)
