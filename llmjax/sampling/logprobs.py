"""Log-probabilities of given tokens and of the most likely ones."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from llmjax.sampling.top import top_entries


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogprobArrays:
    """Log-probabilities at N positions; K is the number of top tokens kept."""

    logprob: jax.Array  # f32 [N]: of the target
    rank: jax.Array  # i32 [N]: 1 + number of tokens more likely than the target
    top_ids: jax.Array  # i32 [N, K]: most likely first, lower id first among equals; -1 past the vocabulary
    top_logprobs: jax.Array  # f32 [N, K]
    scored: jax.Array  # f32 [N, A]: of the tokens that a request names; -inf where it names fewer


def token_logprobs(
    logits: jax.Array, targets: jax.Array, *, max_logprobs: int, scored: jax.Array | None = None
) -> LogprobArrays:
    """log_softmax of the raw logits at the targets, at the top and at tokens that are asked for.

    Args:
        logits: float [N, V], before any processing.
        targets: i32 [N]; of one from V on, which stands for a row of a picture, the logarithm is that of 0.
        max_logprobs: K.
        scored: i32 [N, A], V where there is none; None: A is 0.
    """
    logits = logits.astype(jnp.float32)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    log_total = jnp.log(jnp.sum(jnp.exp(logits - peak), axis=-1, keepdims=True))
    size = logits.shape[-1]
    target = jnp.take_along_axis(logits, jnp.minimum(targets, size - 1)[:, None], axis=-1)
    target = jnp.where(targets[:, None] < size, target, -jnp.inf)
    top, top_ids = top_entries(logits, min(max_logprobs, logits.shape[-1]))
    if scored is None:
        scored = jnp.zeros((logits.shape[0], 0), jnp.int32)
    named = jnp.take_along_axis(logits, jnp.minimum(scored, logits.shape[-1] - 1), axis=-1)
    missing = ((0, 0), (0, max_logprobs - top.shape[-1]))
    return LogprobArrays(
        logprob=(target - peak - log_total)[:, 0],
        rank=1 + lax.platform_dependent(logits, target, cpu=_above_by_rows, default=_above),
        top_ids=jnp.pad(top_ids.astype(jnp.int32), missing, constant_values=-1),
        top_logprobs=jnp.pad(top - peak - log_total, missing, constant_values=-jnp.inf),
        scored=jnp.where(scored < logits.shape[-1], named - peak - log_total, -jnp.inf),
    )


def _above(logits: jax.Array, target: jax.Array) -> jax.Array:
    """Entries of each row of f32 [N, V] above that row's of f32 [N, 1]; i32 [N]."""
    return jnp.sum(logits > target, axis=-1, dtype=jnp.int32)


def _above_by_rows(logits: jax.Array, target: jax.Array) -> jax.Array:
    """XLA for CPUs writes what it compares to memory first: of one row it stays in the cache."""
    found: jax.Array = lax.map(lambda row: _above(*row), (logits, target))
    return found


def no_logprobs(num: int, *, max_logprobs: int, max_scored: int = 0) -> LogprobArrays:
    """Zeros of the same shapes, for steps in which nobody asked."""
    return LogprobArrays(
        logprob=jnp.zeros(num, jnp.float32),
        rank=jnp.zeros(num, jnp.int32),
        top_ids=jnp.zeros((num, max_logprobs), jnp.int32),
        top_logprobs=jnp.zeros((num, max_logprobs), jnp.float32),
        scored=jnp.zeros((num, max_scored), jnp.float32),
    )
