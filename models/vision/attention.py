"""Attention among patches of equal segment, and the rotation of queries and keys."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

BLOCK = 512
"""Queries whose scores are in memory at once."""


def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, *, scale: float) -> jax.Array:
    """Softmax attention of each patch to those of its segment.

    Args:
        q, k, v: [P, heads, head_dim].
        segments: i32 [P].

    Returns:
        [P, heads, head_dim] in q's dtype.
    """

    def rows(q: jax.Array, seen: jax.Array) -> jax.Array:
        scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(seen[:, None] == segments, scores, -jnp.inf)
        shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("hqk,khd->qhd", shares, v, preferred_element_type=jnp.float32).astype(q.dtype)

    whole, rest = divmod(len(q), BLOCK)
    if not whole:
        return rows(q, segments)
    first = whole * BLOCK
    blocks = (q[:first].reshape(whole, BLOCK, *q.shape[1:]), segments[:first].reshape(whole, BLOCK))
    out = jax.lax.map(lambda block: rows(*block), blocks).reshape(first, *q.shape[1:])
    return jnp.concatenate([out, rows(q[first:], segments[first:])]) if rest else out


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
