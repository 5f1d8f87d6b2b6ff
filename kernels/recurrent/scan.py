"""Tokens of a step run through the states of their rows, whatever the rule by which a token rewrites a state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.loops import while_loop
from llmjax.kernels.recurrent.places import Places, read_entries, write_entries

CHUNK = 64  # tokens that are computed by products of matrices


@dataclass(frozen=True)
class Rule:
    """How tokens rewrite a state and what they read of it, in two ways that give the same.

    A token whose arrays are all zero leaves the state as it is.

    Attributes:
        step: one token of each of R rows: arrays [R, ...] of the tokens, then states [R, ...]; returns what is read,
            f32 [R, H, v], and the states.
        chunk: C tokens of one row at once: arrays [C, ...], then the state; returns f32 [C, H, v], and the state.
    """

    step: Callable[..., tuple[jax.Array, jax.Array]]
    chunk: Callable[..., tuple[jax.Array, jax.Array]]


def scan(
    rule: Rule,
    tokens: tuple[jax.Array, ...],
    states: jax.Array,
    batch: RaggedBatch,
    *,
    read: tuple[int, int],
    page_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Runs a step's tokens through the states of their rows.

    Args:
        tokens: what the rule takes, f32 [T, ...] each.
        states: f32 [N, ...], rewritten in place when donated; see ``places``.
        batch: which token belongs to which row; only ``slots`` has no meaning here.
        read: heads, and entries of what each reads.
        page_size: tokens in a page.

    Returns:
        f32 [T, *read], and the states.
    """
    places, count = Places(batch, page_size), len(tokens[0])
    out = jnp.zeros((count, *read), jnp.float32)
    # Rows of one token side by side.
    source, write, first = places.single_entries(len(states))
    before = jnp.where(first.reshape(-1, *[1] * (states.ndim - 1)), 0, read_entries(states, source))
    at = jnp.arange(count) if batch.decode else jnp.minimum(batch.query_start[:-1], count - 1)
    output, after = rule.step(*(x[at] for x in tokens), before)
    states = write_entries(states, write, after)
    if batch.decode:
        return output, states
    out = out.at[jnp.where(places.single, at, count)].set(output, mode="drop")
    return _longer(rule, tokens, out, states, places)


def _longer(
    rule: Rule, tokens: tuple[jax.Array, ...], out: jax.Array, states: jax.Array, places: Places
) -> tuple[jax.Array, jax.Array]:
    """Rows of several tokens, one piece after another: a piece ends where the row goes on to another entry."""
    batch, longest = places.batch, min(CHUNK, len(out))
    rows, count = places.longer_rows()
    starts = batch.kv_len - places.counts  # positions

    def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        number, done, out, states = carry
        row = rows[number]
        position = starts[row] + done
        size = places.piece(row, position, longest=longest)
        index = batch.query_start[row] + done + jnp.arange(longest)
        real = jnp.arange(longest) < size
        inputs = (
            jnp.where(real.reshape(-1, *[1] * (x.ndim - 1)), x[jnp.minimum(index, len(x) - 1)], 0) for x in tokens
        )
        before = jnp.where(position == 0, 0, read_entries(states, places.entry(row, position - 1)[None])[0])
        output, after = rule.chunk(*inputs, before)
        out = out.at[jnp.where(real, index, len(out))].set(output, mode="drop")
        states = write_entries(states, places.entry(row, position + size - 1)[None], after[None])
        over = done + size >= places.counts[row]
        return number + over, jnp.where(over, 0, done + size), out, states

    start = (jnp.int32(0), jnp.int32(0), out, states)
    # Pieces end with a row, with a page, or when they are as long as they may be; none is empty.
    size = len(out)
    most = min(size, size // longest + size // places.page_size + 2 * len(batch.kv_len))
    _, _, out, states = while_loop(lambda carry: carry[0] < count, body, start, most=most)
    return out, states


def left_between(decay: jax.Array) -> jax.Array:
    """What is left behind each token of what an earlier one has written.

    Args:
        decay: f32 [H, C], logarithms, 0 at most.

    Returns:
        f32 [H, C, C], at (i, j) the exponential of the sum over tokens ``j + 1`` to ``i``, 0 where j is after i. Each
        is summed by itself: differences of sums over all tokens cancel where one has forgotten nearly everything.
    """
    size = decay.shape[1]
    lower = jnp.tril(jnp.ones((size, size), bool))
    from_next = jnp.where(jnp.tril(lower, -1), decay[:, :, None], 0)
    sums = jnp.einsum("il,hlj->hij", lower.astype(decay.dtype), from_next, precision="highest")  # faster than cumsum
    return jnp.where(lower, jnp.exp(sums), 0)
