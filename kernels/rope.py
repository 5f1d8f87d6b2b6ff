"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of heads whose angles are given."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rotation:
    """Cosine and sine of every token's angles, attention factor included."""

    cos: jax.Array  # f32 [T, rotary_dim / 2]
    sin: jax.Array  # f32 [T, rotary_dim / 2]


def rotate(x: jax.Array, by: Rotation, *, interleaved: bool = False) -> jax.Array:
    """Rotates the first ``rotary_dim`` entries of each head pairwise and passes the rest through.

    Args:
        x: [T, heads, h].
        interleaved: pairs are (2i, 2i + 1) instead of (i, i + rotary_dim / 2).

    Returns:
        [T, heads, h] in x's dtype; computed in f32.
    """
    half = by.cos.shape[-1]
    cos, sin = by.cos[:, None], by.sin[:, None]
    rotary, rest = x[..., : 2 * half].astype(jnp.float32), x[..., 2 * half :]
    a, b = (rotary[..., 0::2], rotary[..., 1::2]) if interleaved else (rotary[..., :half], rotary[..., half:])
    turned = (a * cos - b * sin, a * sin + b * cos)
    joined = jnp.stack(turned, -1).reshape(rotary.shape) if interleaved else jnp.concatenate(turned, -1)
    joined = joined.astype(x.dtype)
    return jnp.concatenate((joined, rest), -1) if rest.shape[-1] else joined
