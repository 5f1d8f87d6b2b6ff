"""Causal convolution of each channel by itself, over the last few tokens, whose inputs are the state."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.cpu import recurrent as cpu
from llmjax.kernels.loops import for_loop
from llmjax.kernels.recurrent.places import Places, read_entries, write_entries
from llmjax.kernels.registry import Implementation, Operation


def causal_convolution(
    x: jax.Array, weight: jax.Array, states: jax.Array, batch: RaggedBatch, *, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """``y_t = sum over j of w_j x_(t - W + 1 + j)``, with zeros before a sequence's first token.

    Args:
        x: f32 [T, C].
        weight: f32 [C, W], the newest token's weight last.
        states: f32 [N, W - 1, C], the inputs of the last tokens, oldest first, rewritten in place when donated; see
            ``places``.
        batch: which token belongs to which row.
        page_size: tokens in a page.

    Returns:
        f32 [T, C], and the states.
    """
    convolved: tuple[jax.Array, jax.Array] = CONVOLUTION(x, weight, states, batch, page_size=page_size)
    return convolved


def by_shifts(
    x: jax.Array, weight: jax.Array, states: jax.Array, batch: RaggedBatch, *, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """`causal_convolution` in plain XLA operations."""
    places, width = Places(batch, page_size), weight.shape[1]
    rows = jnp.arange(len(batch.kv_len))
    starts = batch.kv_len - places.counts
    before = read_entries(states, places.entry(rows, starts - 1))  # [R, W - 1, C]
    before = jnp.where((starts <= 0)[:, None, None], 0, before)
    if batch.decode:
        inputs = jnp.concatenate((before, x[:, None]), axis=1)
        _, write, _ = places.single_entries(len(states))
        y = jnp.einsum("twc,cw->tc", inputs, weight, precision="highest")
        return y, write_entries(states, write, inputs[:, 1:])

    index = jnp.arange(len(x))
    row = jnp.searchsorted(batch.query_start, index, side="right", method="compare_all") - 1
    row = jnp.minimum(row, len(batch.kv_len) - 1)
    offset = index - batch.query_start[row]

    def back(count: int, at: jax.Array) -> jax.Array:
        """The inputs ``count`` tokens before those at ``at``."""
        missing = count - offset[at]  # tokens before the row's first
        in_step, earlier = x[jnp.maximum(at - count, 0)], before[row[at], jnp.clip(width - 1 - missing, 0, width - 2)]
        return jnp.where((missing > 0)[:, None], earlier, in_step)

    y = sum(back(width - 1 - j, index) * weight[:, j] for j in range(width))
    position = starts[row] + offset
    following = places.entry(row, position + 1) != places.entry(row, position)
    last = (offset + 1 == places.counts[row]) | following
    last = last & (index < batch.query_start[-1])
    ends = jnp.argsort(~last, stable=True)

    def store(i: jax.Array, states: jax.Array) -> jax.Array:
        at = ends[i][None]
        last_inputs = jnp.concatenate([back(count, at) for count in range(width - 2, -1, -1)])
        return write_entries(states, places.entry(row[at], position[at]), last_inputs[None])

    # A row leaves one where it ends, and one in every page that it fills.
    most = min(len(x), len(x) // page_size + 2 * len(rows))
    return y, for_loop(0, last.sum(), store, states, most=most)


# Positional: x, weight, states, batch. Static: page_size.
CONVOLUTION = Operation(
    "causal convolution",
    (
        Implementation("C++", cpu.causal_convolution, platform="cpu", refuses=cpu.refuses_convolution),
        Implementation("XLA", by_shifts),
    ),
)
