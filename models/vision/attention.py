"""Attention among patches of equal segment, and the rotation of queries and keys."""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

BLOCK = 512
"""Queries whose scores are in memory at once."""


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    *,
    scale: float,
    tile: int | None = None,
    reach: int | None = None,
) -> jax.Array:
    """Softmax attention of each patch to those of its segment.

    Args:
        q, k, v: [P, heads, head_dim].
        segments: i32 [P].
        tile: patches of a segment, where all have as many; None: they differ.
        reach: no patch sees one that is this many places away; None: it may see any.

    Returns:
        [P, heads, head_dim] in q's dtype.
    """
    if tile is not None and len(q) > tile:
        tiles = (each.reshape(-1, tile, *each.shape[1:]) for each in (q, k, v, segments))
        alone = partial(_by_blocks, scale=scale, reach=reach)
        return jax.lax.map(lambda each: alone(*each), tuple(tiles)).reshape(q.shape)
    return _by_blocks(q, k, v, segments, scale=scale, reach=reach)


def _by_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, *, scale: float, reach: int | None
) -> jax.Array:
    """`attend`, by blocks of queries."""
    count = len(q)
    near = count if reach is None else min(count, BLOCK + 2 * reach)

    def block(first: jax.Array, q: jax.Array, seen: jax.Array) -> jax.Array:
        start = jnp.clip(first - (reach or 0), 0, count - near)
        keys, values, known = (jax.lax.dynamic_slice_in_dim(each, start, near) for each in (k, v, segments))
        scores = jnp.einsum("qhd,khd->hqk", q, keys, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(seen[:, None] == known, scores, -jnp.inf)
        shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("hqk,khd->qhd", shares, values, preferred_element_type=jnp.float32).astype(q.dtype)

    whole, rest = divmod(count, BLOCK)
    first = whole * BLOCK
    if not whole:
        return block(jnp.int32(0), q, segments)
    starts = jnp.arange(0, first, BLOCK, dtype=jnp.int32)
    blocks = (starts, q[:first].reshape(whole, BLOCK, *q.shape[1:]), segments[:first].reshape(whole, BLOCK))
    out = jax.lax.map(lambda each: block(*each), blocks).reshape(first, *q.shape[1:])
    return jnp.concatenate([out, block(jnp.int32(first), q[first:], segments[first:])]) if rest else out


def turn(x: jax.Array, angles: jax.Array, pairs: Literal["half", "quarter", "adjacent"]) -> jax.Array:
    """Turns the pairs of each head's entries, in f32.

    Args:
        x: [P, heads, head_dim].
        angles: f32 [P, head_dim / 2].
        pairs: which entries make a pair, see ``Rope2D``.
    """
    shape, wide = x.shape, x.astype(jnp.float32)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    if pairs == "adjacent":
        first, second = wide[..., 0::2], wide[..., 1::2]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.reshape(shape).astype(x.dtype)
    parts = 2 if pairs == "quarter" else 1
    split = wide.reshape(*shape[:2], parts, 2, -1)
    cos, sin = (each.reshape(len(angles), 1, parts, -1) for each in (cos, sin))
    first, second = split[..., 0, :], split[..., 1, :]
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-2)
    return turned.reshape(shape).astype(x.dtype)
