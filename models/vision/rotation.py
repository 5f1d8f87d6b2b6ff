"""The rotation of queries and keys of patches."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp


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
