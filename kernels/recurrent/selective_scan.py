"""Selective state spaces over states in entries (Mamba: Gu and Dao 2023, arXiv:2312.00752).

Each channel i has a state of n entries, which a token rewrites with a step d of the channel's own,
``S_ni = exp(d_i a_ni) S_ni + b_n d_i x_i``, and reads: ``o_i = sum over n of c_n S_ni``. Since each entry forgets at a
rate of its own, a chunk is not a product of matrices.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.cpu import recurrent as cpu
from llmjax.kernels.recurrent.scan import Rule, scan
from llmjax.kernels.registry import Implementation, Operation


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
    read: tuple[jax.Array, jax.Array] = SELECTIVE_SCAN(c, b, x, steps, rates, states, batch, page_size=page_size)
    return read


def by_scan(
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
    """`selective_scan` in plain XLA operations."""
    inputs = c, b, steps * x, steps
    rule = Rule(partial(step, rates), partial(chunk, rates))
    read, states = scan(rule, inputs, states, batch, read=(1, x.shape[1]), page_size=page_size)
    return read[:, 0], states


def step(
    rates: jax.Array, c: jax.Array, b: jax.Array, written: jax.Array, steps: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of each of R rows, as the rule is written.

    Args:
        rates: as for `selective_scan`; so are c, b and steps, R for T.
        written: f32 [R, I], ``d x``.
        state: f32 [R, 1, n, I].

    Returns:
        f32 [R, 1, I], and the states.
    """
    left, added = _change(rates, b, written, steps)
    state = left[:, None] * state + added[:, None]
    return jnp.sum(c[:, None, :, None] * state, axis=2), state


def chunk(
    rates: jax.Array, c: jax.Array, b: jax.Array, written: jax.Array, steps: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """C tokens of one row at once: what two pieces of a sequence do to a state is what one does that they are, so that
    pieces are put together in a tree (Blelloch 1990, section 1.4).

    Args:
        rates, c, b, written, steps: as for `step`, C for R.
        state: f32 [1, n, I].

    Returns:
        f32 [C, 1, I], and the state.
    """

    def together(first: tuple[jax.Array, ...], then: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return first[0] * then[0], first[1] * then[0] + then[1]

    left, added = jax.lax.associative_scan(together, _change(rates, b, written, steps))
    states = left * state + added  # [C, n, I]
    return jnp.sum(c[..., None] * states, axis=1)[:, None], states[-1:]


def _change(rates: jax.Array, b: jax.Array, written: jax.Array, steps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a token leaves of a state and what it adds, f32 [T, n, I] each."""
    return jnp.exp(steps[:, None] * rates), b[..., None] * written[:, None]


# Positional: c, b, x, steps, rates, states, batch. Static: page_size.
SELECTIVE_SCAN = Operation(
    "selective scan",
    (
        Implementation("C++", cpu.selective_scan, platform="cpu", refuses=cpu.refuses),
        Implementation("XLA", by_scan),
    ),
)
