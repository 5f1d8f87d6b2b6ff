"""The delta rule with a decay of each channel (Kimi Delta Attention: Kimi Team 2025, arXiv:2510.26692) over states in
entries.

A head's state S, [k, v], is rewritten by each token, ``S = diag(exp(g)) S`` and then ``S = S + b k (v - kᵀ S)``, and
read: ``o = qᵀ S``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.cpu import recurrent as cpu
from llmjax.kernels.recurrent.scan import Rule, left_between, scan
from llmjax.kernels.registry import Implementation, Operation

BLOCK = 16  # tokens: what each channel of a key keeps from one to another is an array of its own


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
    read: tuple[jax.Array, jax.Array] = CHANNEL_DELTA(q, k, v, decay, beta, states, batch, page_size=page_size)
    return read


def by_scan(
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
    """`channel_delta` in plain XLA operations."""
    inputs = (q, k, v, decay, beta)
    return scan(Rule(step, chunk), inputs, states, batch, read=v.shape[1:], page_size=page_size)


def step(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of each of R rows, as the rule is written; arguments as for `channel_delta`, R for T."""
    state = state * jnp.exp(decay)[..., None]
    stored = jnp.einsum("rhk,rhkv->rhv", k, state, precision="highest")
    delta = (v - stored) * beta[..., None]
    state = state + k[..., None] * delta[..., None, :]
    return jnp.einsum("rhk,rhkv->rhv", q, state, precision="highest"), state


def chunk(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """C tokens of one row, a block after another.

    Args:
        q, k, v, decay, beta: as for `channel_delta`, C for T.
        state: f32 [H, k, v].

    Returns:
        f32 [C, H, v], and the state.
    """

    def once(state: jax.Array, tokens: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, decay, beta = tokens
        read, state = block(q, k, v, decay, beta, state)
        return state, read

    def in_blocks(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, -len(x) % BLOCK), *[(0, 0)] * (x.ndim - 1)))
        return padded.reshape(-1, BLOCK, *x.shape[1:])

    state, read = jax.lax.scan(once, state, tuple(map(in_blocks, (q, k, v, decay, beta))))
    return read.reshape(-1, *v.shape[1:])[: len(v)], state


def block(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Tokens at once, by the WY form of their product (arXiv:2510.26692, section 3); arguments as for `chunk`.

    It is that of ``gated_delta.chunk``, but for what is left from token j to i, which is a vector d_ij of the channels:
    ``k_i · k_j`` becomes ``(k_i d_ij) · k_j``.
    """
    q, k, v, decay, beta = (jnp.moveaxis(x, 0, 1) for x in (q, k, v, decay, beta))  # [H, C, …]
    heads, count, channels = k.shape
    between = left_between(jnp.moveaxis(decay, 1, 2).reshape(heads * channels, count))
    between = jnp.moveaxis(between.reshape(heads, channels, count, count), 1, -1)  # [H, C, C, k]
    of_state = jnp.exp(jnp.cumsum(decay, axis=1))

    def product(letters: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(letters, x, y, precision="highest")

    def meets(x: jax.Array) -> jax.Array:
        """What tokens see of those before them, f32 [H, C, C]."""
        return jnp.sum(x[:, :, None] * k[:, None] * between, axis=-1)

    right = (v - product("hik,hkv->hiv", k * of_state, state)) * beta[..., None]
    written = solve_triangular(meets(k) * beta[..., None], right, lower=True, unit_diagonal=True)
    out = product("hik,hkv->hiv", q * of_state, state) + product("hij,hjv->hiv", meets(q), written)
    state = state * of_state[:, -1][..., None] + product("hik,hiv->hkv", k * between[:, -1], written)
    return jnp.moveaxis(out, 0, 1), state


# Positional: q, k, v, decay, beta, states, batch. Static: page_size.
CHANNEL_DELTA = Operation(
    "channel delta rule",
    (
        Implementation("C++", cpu.gated_delta, platform="cpu", refuses=cpu.refuses),
        Implementation("XLA", by_scan),
    ),
)
