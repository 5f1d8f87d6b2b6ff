"""Linear attention with decay over states in entries: state space duality (Dao and Gu 2024, arXiv:2405.21060).

A head's state S, [k, v], is rewritten by each token, ``S = exp(g) S + k vᵀ``, and read: ``o = qᵀ S``. Heads of one
group share a query and a key.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.cpu import recurrent as cpu
from llmjax.kernels.recurrent.scan import Rule, left_between, scan
from llmjax.kernels.registry import Implementation, Operation


def linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    states: jax.Array,
    batch: RaggedBatch,
    *,
    page_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Runs a step's tokens through the states of their rows.

    Args:
        q, k: f32 [T, G, k]; ``H / G`` heads that follow each other share them.
        v: f32 [T, H, v].
        decay: f32 [T, H], logarithms g of what is left of the state, 0 at most.
        states: f32 [N, H, k, v], rewritten in place when donated; see ``places``.
        batch: which token belongs to which row; only ``slots`` has no meaning here.
        page_size: tokens in a page.

    Returns:
        f32 [T, H, v], and the states.
    """
    read: tuple[jax.Array, jax.Array] = LINEAR_ATTENTION(q, k, v, decay, states, batch, page_size=page_size)
    return read


def by_scan(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    states: jax.Array,
    batch: RaggedBatch,
    *,
    page_size: int,
) -> tuple[jax.Array, jax.Array]:
    """`linear_attention` in plain XLA operations."""
    return scan(Rule(step, chunk), (q, k, v, decay), states, batch, read=v.shape[1:], page_size=page_size)


def step(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token of each of R rows, as the rule is written.

    Args:
        q, k, v, decay: as for `linear_attention`, R for T.
        state: f32 [R, H, k, v].

    Returns:
        f32 [R, H, v], and the states.
    """
    shared = v.shape[1] // q.shape[1]
    q, k = (jnp.repeat(x, shared, axis=1) for x in (q, k))
    state = state * jnp.exp(decay)[..., None, None] + k[..., None] * v[..., None, :]
    return jnp.einsum("rhk,rhkv->rhv", q, state, precision="highest"), state


def chunk(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """C tokens of one row at once, as products of matrices (arXiv:2405.21060, section 6).

    With ``d_i`` the decay from the state to token i and ``d_ij = d_i / d_j``, token i reads
    ``d_i q_iᵀ S + sum over j <= i of d_ij (q_i · k_j) v_j``.

    Args:
        q, k, v, decay: as for `linear_attention`, C for T.
        state: f32 [H, k, v].

    Returns:
        f32 [C, H, v], and the state.
    """
    q, k, v, decay = (jnp.moveaxis(x, 0, 1) for x in (q, k, v, decay))  # [G or H, C, …]
    groups, heads = len(q), len(v)
    total = jnp.cumsum(decay, axis=1)
    between = left_between(decay)

    def by_group(x: jax.Array) -> jax.Array:
        return x.reshape(groups, heads // groups, *x.shape[1:])

    def product(letters: str, x: jax.Array, y: jax.Array) -> jax.Array:
        result = jnp.einsum(letters, x, y, precision="highest")
        return result.reshape(heads, *result.shape[2:])

    scores = jnp.einsum("gik,gjk->gij", q, k, precision="highest")[:, None] * by_group(between)
    out = jnp.exp(total)[..., None] * product("gik,ghkv->ghiv", q, by_group(state))
    out = out + product("ghij,ghjv->ghiv", scores, by_group(v))
    left = between[:, -1, :, None]
    state = state * jnp.exp(total[:, -1:])[..., None] + product("gik,ghiv->ghkv", k, by_group(v * left))
    return jnp.moveaxis(out, 0, 1), state


# Positional: q, k, v, decay, states, batch. Static: page_size.
LINEAR_ATTENTION = Operation(
    "linear attention",
    (
        Implementation("C++", cpu.linear_attention, platform="cpu", refuses=cpu.refuses),
        Implementation("XLA", by_scan),
    ),
)
