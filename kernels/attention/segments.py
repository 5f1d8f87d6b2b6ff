"""Attention of tokens to all tokens of their segment: patches of pictures, which know no order."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from llmjax.kernels.cpu import segments as cpu
from llmjax.kernels.cpu.library import library
from llmjax.kernels.registry import Implementation, Operation

BLOCK = 512
"""Queries whose scores are in memory at once."""
UNSEEN = -2
"""``UNSEEN - s`` is the segment of a token that sees the tokens of ``s``, and that none sees."""


def attend_segments(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    *,
    scale: float,
    dtype: jnp.dtype | None = None,
    tile: int | None = None,
    reach: int | None = None,
) -> jax.Array:
    """Softmax attention of each token to those of its segment.

    Args:
        q, k, v: [T, heads, head_dim].
        segments: i32 [T]; the tokens of a segment stand one after another, but for some of no segment (-1) that may
            stand among them. So may tokens that see those of a segment and that none sees, see `UNSEEN`.
        dtype: what queries, keys and values are rounded to, as hardware multiplies it; None: q's.
        tile: tokens of a segment, where all have as many; None: they differ.
        reach: no token sees one that is this many places away; None: it may see any.

    Returns:
        [T, heads, head_dim] in q's dtype; that of tokens of no segment, or which see none, is anything finite.
    """
    dtype = jnp.dtype(q.dtype if dtype is None else dtype)
    attended: jax.Array = SEGMENTS(q, k, v, segments, scale=scale, dtype=dtype, tile=tile, reach=reach)
    return attended


def attend_by_xla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    *,
    scale: float,
    dtype: jnp.dtype,
    tile: int | None = None,
    reach: int | None = None,
) -> jax.Array:
    """`attend_segments` by blocks of queries, whose scores are masked."""
    given, (q, k, v) = q.dtype, (each.astype(dtype) for each in (q, k, v))
    if tile is not None and len(q) > tile:
        tiles = (each.reshape(-1, tile, *each.shape[1:]) for each in (q, k, v, segments))
        alone = partial(_by_blocks, scale=scale, reach=reach)
        return jax.lax.map(lambda each: alone(*each), tuple(tiles)).reshape(q.shape).astype(given)
    return _by_blocks(q, k, v, segments, scale=scale, reach=reach).astype(given)


def _by_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, *, scale: float, reach: int | None
) -> jax.Array:
    count = len(q)
    near = count if reach is None else min(count, BLOCK + 2 * reach)

    def block(first: jax.Array, q: jax.Array, seen: jax.Array) -> jax.Array:
        start = jnp.clip(first - (reach or 0), 0, count - near)
        keys, values, known = (jax.lax.dynamic_slice_in_dim(each, start, near) for each in (k, v, segments))
        scores = jnp.einsum("qhd,khd->hqk", q, keys, preferred_element_type=jnp.float32) * scale
        sees = jnp.where(seen <= UNSEEN, UNSEEN - seen, seen)
        # Finite, so that what sees nothing is finite too.
        scores = jnp.where(sees[:, None] == known, scores, jnp.finfo(jnp.float32).min)
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


def _native(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, *, scale: float, dtype: jnp.dtype, **_: Any
) -> jax.Array:
    return cpu.attend(q, k, v, segments, scale=scale, dtype=dtype)


def _native_refuses(q: jax.Array, *_: Any, dtype: jnp.dtype, **__: Any) -> str | None:
    return cpu.refuses(q, dtype) or (None if library() is not None else "not built")


# Positional: q, k, v, segments. Static: scale, dtype, tile, reach.
SEGMENTS = Operation(
    "attention of segments",
    (Implementation("C++", _native, platform="cpu", refuses=_native_refuses), Implementation("XLA", attend_by_xla)),
)
