"""min-p, top-k and top-p as one threshold a row, without sorting the vocabulary.

All three keep the tokens from some logit upward, so a row's filters come down to a floor. Tokens of equal logit stand
or fall together: ties with the k-th largest stay (as in vLLM), and top-p keeps the smallest such set of mass >= p.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

SHORTLIST = 128  # on CPUs lax.top_k is fast up to about here
BLOCK = 128  # tokens whose sum is taken first; it divides most vocabularies, so that nothing is padded
DIGIT = 4  # bits of a threshold that a pass over the vocabulary settles on an accelerator


def keep_floor(z: jax.Array, *, min_p: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """The smallest ``z`` that a row keeps: min-p first, then top-k, then top-p of what those two leave.

    Args:
        z: f32 [R, V], logits over temperature less their maximum, so at most 0.
        min_p: f32 [R], share of the largest probability; 0: off.
        top_k: i32 [R]; 0: off.
        top_p: f32 [R]; 1: off.

    Returns:
        f32 [R]; -inf for rows with all three off.
    """
    search = partial(_floor_by_search, digit=DIGIT)
    return lax.platform_dependent(z, min_p, top_k, top_p, cpu=_floor_by_shortlist, default=search)


def _floor_by_search(z: jax.Array, min_p: jax.Array, top_k: jax.Array, top_p: jax.Array, *, digit: int) -> jax.Array:
    off = jnp.full(z.shape[0], -jnp.inf)

    def kth() -> jax.Array:
        return jnp.where(top_k > 0, _search(z, jnp.ones_like(z), top_k.astype(jnp.float32), digit=digit), off)

    floor = jnp.maximum(jnp.log(min_p), lax.cond(jnp.any(top_k > 0), kth, lambda: off))

    def nucleus() -> jax.Array:
        mass = _mass(z, floor)
        return jnp.where(top_p < 1, _search(z, mass, top_p * jnp.sum(mass, axis=-1), digit=digit), off)

    return jnp.maximum(floor, lax.cond(jnp.any(top_p < 1), nucleus, lambda: off))


def _floor_by_shortlist(z: jax.Array, min_p: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """The same from each row's largest few; only rows whose floor lies deeper are searched, one at a time.

    Each row takes its own way, so its floor does not depend on its neighbors. One row at a time stays in the cache.
    """
    length = min(SHORTLIST, z.shape[-1])
    # An optimization barrier, or slices are merged into the top-k, which XLA then no longer sees and sorts instead.
    top = lax.optimization_barrier(lax.top_k(z, length)[0])
    kth = jnp.take_along_axis(top, jnp.clip(top_k, 1, length)[:, None] - 1, axis=-1)[:, 0]
    floor = jnp.maximum(jnp.log(min_p), jnp.where(top_k > 0, kth, -jnp.inf))

    total = jnp.sum(_mass(z, floor), axis=-1)
    reached = jnp.cumsum(_mass(top, floor), axis=-1) >= (top_p * total)[:, None]
    nucleus = jnp.take_along_axis(top, jnp.argmax(reached, axis=-1)[:, None], axis=-1)[:, 0]
    floor = jnp.where((top_p < 1) & reached[:, -1], jnp.maximum(floor, nucleus), floor)

    listed = (length == z.shape[-1]) | (top[:, -1] < floor)
    deeper = (top_k > length) | ((top_p < 1) & ~reached[:, -1] & ~listed)

    def settle(row: tuple[jax.Array, ...]) -> jax.Array:
        deep, shallow, *args = row
        # A row stays in the cache, so that passes cost little there, and one bit each computes the fewest sums.
        return lax.cond(deep, lambda: _floor_by_search(*(a[None] for a in args), digit=1)[0], lambda: shallow)

    return lax.cond(jnp.any(deeper), lambda: lax.map(settle, (deeper, floor, z, min_p, top_k, top_p)), lambda: floor)


def _mass(z: jax.Array, floor: jax.Array) -> jax.Array:
    """Unnormalized probabilities of what lies above the floor. z [R, K], floor [R]."""
    return jnp.where(z >= floor[:, None], jnp.exp(z), 0.0)


@partial(jax.jit, static_argnames="digit")  # traced once for each shape, not once for each use in each step program
def _search(z: jax.Array, weight: jax.Array, target: jax.Array, *, digit: int) -> jax.Array:
    """The largest t with sum(weight where z >= t) >= target: exact, digit by digit over the bit patterns of -t.

    Non-negative floats are ordered as their bits, and a masked sum in a fixed order never grows when a term goes away.
    All sums of a digit are taken in one pass over the vocabulary, which is what costs an accelerator time.

    Args:
        z: f32 [R, V], at most 0.
        weight: f32 [R, V], not negative.
        target: f32 [R]; where even the whole sum is smaller, t is -inf.
        digit: bits that a pass settles; it divides 32.
    """
    infinity = lax.bitcast_convert_type(jnp.float32(jnp.inf), jnp.uint32)
    blocks = -(-z.shape[-1] // BLOCK)
    missing = ((0, 0), (0, blocks * BLOCK - z.shape[-1]))
    z = jnp.pad(z, missing, constant_values=-jnp.inf).reshape(-1, blocks, BLOCK)
    weight = jnp.pad(weight, missing).reshape(-1, blocks, BLOCK)

    def threshold(bits: jax.Array) -> jax.Array:
        return -lax.bitcast_convert_type(jnp.minimum(bits, infinity), jnp.float32)

    def settle(i: jax.Array, least: jax.Array) -> jax.Array:
        """``least``: bits below which no threshold is low enough."""
        unit = jnp.uint32(1) << (32 - digit * (i + 1)).astype(jnp.uint32)
        # One reduction of all digits' terms, or XLA writes them to memory; in two stages, which it would else make
        # for each digit alone.
        terms = [
            jnp.where(z >= threshold(least + value * unit - 1)[:, None, None], weight, 0.0)
            for value in range(1, 1 << digit)
        ]
        sums = lax.reduce(terms, [jnp.float32(0)] * len(terms), _add_each, dimensions=(2,))
        # The largest digit such that everything before it still takes too little.
        short = jnp.sum(jnp.stack(sums), axis=-1) < target
        return least + jnp.sum(short, axis=0, dtype=jnp.uint32) * unit

    return threshold(lax.fori_loop(0, 32 // digit, settle, jnp.zeros(z.shape[0], jnp.uint32)))


def _add_each(sums: Sequence[jax.Array], terms: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(a + b for a, b in zip(sums, terms, strict=True))
