"""Selective state spaces over states in entries (Mamba: Gu and Dao 2023, arXiv:2312.00752).

Each channel i has a state of n entries, which a token rewrites with a step d of the channel's own,
``S_ni = exp(d_i a_ni) S_ni + b_n d_i x_i``, and reads: ``o_i = sum over n of c_n S_ni``. Since each entry forgets at a
rate of its own, a chunk is not a product of matrices, and tokens go one after another.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.recurrent.scan import Rule, one_by_one, scan


def selective_scan(
    c: jax.Array,
    b: jax.Array,
    x: jax.Array,
    steps: jax.Array,
    rates: jax.Array,
    states: jax.Array,
    batch: RaggedBatch,
    *,
    page_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Runs a step's tokens through the states of their rows.

    Args:
        c, b: f32 [T, n], what states are read and written with.
        x: f32 [T, I].
        steps: f32 [T, I], d, at least 0.
        rates: f32 [n, I], a, below 0.
        states: f32 [N, 1, n, I], rewritten in place when donated; see ``places``.
        batch: which token belongs to which row; only ``slots`` has no meaning here.
        page_size: tokens in a page.

    Returns:
        f32 [T, I], and the states.
    """

    def step(
        c: jax.Array, b: jax.Array, written: jax.Array, steps: jax.Array, state: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """One token of each of R rows; what is read has a middle axis of one."""
        left = jnp.exp(steps[:, None, None] * rates)
        state = left * state + b[:, None, :, None] * written[:, None, None]
        return jnp.sum(c[:, None, :, None] * state, axis=2), state

    rule, tokens = Rule(step, one_by_one(step)), (c, b, steps * x, steps)
    read, states = scan(rule, tokens, states, batch, read=(1, x.shape[1]), page_size=page_size)
    return read[:, 0], states
