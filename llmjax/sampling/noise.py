"""Gumbel noise that depends on seed, position and token id only.

Threefry over [R, V] would cost more than the rest of the sampler on a CPU, so it makes only the two key words of a row;
each token then hashes its id with them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def row_keys(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """``fold_in(key(seed), position)`` of each row, as key data.

    Args:
        seeds: u32 [R, 2], high word first.
        positions: i32 [R].

    Returns:
        u32 [R, 2].
    """

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, position))

    return jax.vmap(one)(seeds, positions)


def gumbel(keys: jax.Array, vocab_size: int) -> jax.Array:
    """Standard Gumbel noise f32 [R, V], one independent stream for each row of ``keys`` (u32 [R, 2])."""
    ids = jnp.arange(vocab_size, dtype=jnp.uint32)
    bits = _mix(_mix(ids[None, :] ^ keys[:, :1]) ^ keys[:, 1:])
    # Uniform in (0, 1), counted from the end where the noise is large: it keeps all 32 bits there, and winners among
    # many unlikely tokens come from there.
    uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    uniform = jnp.minimum(uniform, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def _mix(h: jax.Array) -> jax.Array:
    """The integer hash "lowbias32" (C. Wellons, Prospecting for Hash Functions, 2018; public domain)."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)
