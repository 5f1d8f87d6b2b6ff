"""A token of each row: temperature, min-p, top-k and top-p, then Gumbel-max: the argmax of logits and Gumbel noise is a
sample of their softmax (Gumbel 1954)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from llmjax.kernels.argmax import argmax
from llmjax.sampling.noise import gumbel
from llmjax.sampling.truncation import keep_floor


def draw(
    x: jax.Array,
    *,
    keys: jax.Array,
    temperature: jax.Array,
    min_p: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
) -> jax.Array:
    """One token of each row; a row in which nothing may be sampled (every logit -inf, or NaN) gives token 0.

    With the noise of every token: ``kernels/cpu/src/sample_kernel.h`` finds the same ones with that of few.

    Args:
        x: f32 [R, V], logits.
        keys: u32 [R, 2], see ``row_keys``: the noise of a row depends on its key and on token ids alone.
        temperature: f32 [R]; 0: the most likely token.
        min_p, top_k, top_p: f32, i32 and f32 [R], see ``keep_floor``.

    Returns:
        i32 [R].
    """
    random = temperature > 0
    peak = jnp.max(x, axis=-1, keepdims=True)
    # Two infinities of one sign would cancel to NaN: the peak itself is 0, and a row of -inf stays one.
    below = (x - jnp.maximum(peak, jnp.finfo(x.dtype).min)) / jnp.where(random, temperature, 1.0)[:, None]
    z = jnp.where((x == peak) & (peak > -jnp.inf), 0.0, below)
    floor = lax.cond(
        jnp.any(random & ((min_p > 0) | (top_k > 0) | (top_p < 1))),
        lambda: keep_floor(z, min_p=min_p, top_k=top_k, top_p=top_p),
        lambda: jnp.full(x.shape[0], -jnp.inf),
    )
    scores = jnp.where(z >= floor[:, None], z + gumbel(keys, x.shape[-1]), -jnp.inf)
    # After an optimization barrier the scores exist in memory: both passes of the argmax see the same bits.
    return argmax(lax.optimization_barrier(jnp.where(random[:, None], scores, x)))
