"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464) over states in entries.

A head's state S, [k, v], is rewritten by each token, ``S = exp(g) S`` and then ``S = S + b k (v - kᵀ S)``, and read:
``o = qᵀ S``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.cpu import recurrent as cpu
from llmjax.kernels.recurrent.scan import Rule, left_between, scan
from llmjax.kernels.registry import Implementation, Operation


def gated_delta(
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
        q, k: f32 [T, G, k], as they meet the state: normed, q scaled; ``H / G`` heads that follow each other share
            them.
        v: f32 [T, H, v].
        decay: f32 [T, H], logarithms g of what is left of the state, 0 at most.
        beta: f32 [T, H], how much of the new value is written.
        states: f32 [N, H, k, v], rewritten in place when donated; see ``places``.
        batch: which token belongs to which row; only ``slots`` has no meaning here.
        page_size: tokens in a page.

    Returns:
        f32 [T, H, v], and the states.
    """
    read: tuple[jax.Array, jax.Array] = GATED_DELTA(q, k, v, decay, beta, states, batch, page_size=page_size)
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
    """`gated_delta` in plain XLA operations."""
    q, k = (jnp.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
    rule = Rule(step, chunk)
    return scan(rule, (q, k, v, decay, beta), states, batch, read=v.shape[1:], page_size=page_size)


def step(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of each of R rows, as the rule is written.

    Args:
        q, k: f32 [R, H, k].
        v, decay, beta: as for `gated_delta`, R for T.
        state: f32 [R, H, k, v].

    Returns:
        f32 [R, H, v], and the states.
    """
    state = state * jnp.exp(decay)[..., None, None]
    stored = jnp.einsum("rhk,rhkv->rhv", k, state, precision="highest")
    delta = (v - stored) * beta[..., None]
    state = state + k[..., None] * delta[..., None, :]
    return jnp.einsum("rhk,rhkv->rhv", q, state, precision="highest"), state


def chunk(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """C tokens of one row at once, by the WY form of their product (arXiv:2412.06464, section 3.3).

    With ``d_i`` the decay from the state to token i and ``d_ij = d_i / d_j``, what the tokens write solves
    ``u_i = b_i (v_i - d_i k_iᵀ S - sum over j < i of d_ij (k_i · k_j) u_j)``.

    Args:
        q, k: f32 [C, H, k].
        v, decay, beta: as for `gated_delta`, C for T.
        state: f32 [H, k, v].

    Returns:
        f32 [C, H, v], and the state.
    """
    q, k, v, decay, beta = (jnp.moveaxis(x, 0, 1) for x in (q, k, v, decay, beta))  # [H, C, …]
    total = jnp.cumsum(decay, axis=1)
    between = left_between(decay)
    of_state = jnp.exp(total)[..., None]

    def product(letters: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(letters, x, y, precision="highest")

    system = product("hik,hjk->hij", k, k) * between * beta[..., None]
    right = (v - of_state * product("hik,hkv->hiv", k, state)) * beta[..., None]
    written = solve_triangular(system, right, lower=True, unit_diagonal=True)
    out = of_state * product("hik,hkv->hiv", q, state)
    out = out + product("hij,hjv->hiv", product("hik,hjk->hij", q, k) * between, written)
    left = between[:, -1, :, None]
    state = state * of_state[:, -1:] + product("hik,hiv->hkv", k * left, written)
    return jnp.moveaxis(out, 0, 1), state


# Positional: q, k, v, decay, beta, states, batch. Static: page_size.
GATED_DELTA = Operation(
    "gated delta rule",
    (
        Implementation("C++", cpu.gated_delta, platform="cpu", refuses=cpu.refuses),
        Implementation("XLA", by_scan),
    ),
)
