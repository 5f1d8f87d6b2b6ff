"""The delta rule with a decay of each channel (Kimi Delta Attention: Kimi Team 2025, arXiv:2510.26692) over states in
entries.

A head's state S, [k, v], is rewritten by each token, ``S = diag(exp(g)) S`` and then ``S = S + b k (v - kᵀ S)``, and
read: ``o = qᵀ S``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.recurrent.scan import Rule, one_by_one, scan


def channel_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    states: jax.Array,
    batch: RaggedBatch,
    *,
    page_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Runs a step's tokens through the states of their rows.

    Args:
        q, k: f32 [T, H, k], as they meet the state: normed, q scaled.
        v: f32 [T, H, v].
        decay: f32 [T, H, k], logarithms g of what is left of the state, 0 at most.
        beta: f32 [T, H], how much of the new value is written.
        states: f32 [N, H, k, v], rewritten in place when donated; see ``places``.
        batch: which token belongs to which row; only ``slots`` has no meaning here.
        page_size: tokens in a page.

    Returns:
        f32 [T, H, v], and the states.
    """
    rule = Rule(step, one_by_one(step))
    return scan(rule, (q, k, v, decay, beta), states, batch, read=v.shape[1:], page_size=page_size)


def step(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of each of R rows, as the rule is written; arguments as for `channel_delta`, R for T."""
    state = state * jnp.exp(decay)[..., None]
    known = jnp.einsum("rhk,rhkv->rhv", k, state, precision="highest")
    delta = (v - known) * beta[..., None]
    state = state + k[..., None] * delta[..., None, :]
    return jnp.einsum("rhk,rhkv->rhv", q, state, precision="highest"), state
