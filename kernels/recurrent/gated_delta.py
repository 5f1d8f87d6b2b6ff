"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464) over states in entries.

A head's state S, [k, v], is rewritten by each token, ``S = exp(g) S`` and then ``S = S + b k (v - kᵀ S)``, and read:
``o = qᵀ S``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.recurrent.places import Places

CHUNK = 64  # tokens that are computed by products of matrices


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
        q, k: f32 [T, H, k], as they meet the state: normed, q scaled.
        v: f32 [T, H, v].
        decay: f32 [T, H], logarithms g of what is left of the state, 0 at most.
        beta: f32 [T, H], how much of the new value is written.
        states: f32 [N, H, k, v], rewritten in place when donated; see ``places``.
        batch: which token belongs to which row; only ``slots`` has no meaning here.
        page_size: tokens in a page.

    Returns:
        f32 [T, H, v], and the states.
    """
    places, tokens = Places(batch, page_size), (q, k, v, decay, beta)
    out = jnp.zeros(v.shape, jnp.float32)
    # Rows of one token side by side.
    read, write, first = places.single_entries(len(states))
    before = jnp.where(first[:, None, None, None], 0, states[read])
    at = jnp.arange(len(q)) if batch.decode else jnp.minimum(batch.query_start[:-1], len(q) - 1)
    found, after = step(q[at], k[at], v[at], decay[at], beta[at], before)
    states = states.at[write].set(after, mode="drop")
    if batch.decode:
        return found, states
    out = out.at[jnp.where(places.single, at, len(q))].set(found, mode="drop")
    return _longer(tokens, out, states, places)


def _longer(
    tokens: tuple[jax.Array, ...], out: jax.Array, states: jax.Array, places: Places
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
        # A token that is not there leaves the state as it is.
        q, k, v, decay, beta = (
            jnp.where(real.reshape(-1, *[1] * (x.ndim - 1)), x[jnp.minimum(index, len(x) - 1)], 0) for x in tokens
        )
        before = jnp.where(position == 0, 0, states[places.entry(row, position - 1)])
        found, after = chunk(q, k, v, decay, beta, before)
        out = out.at[jnp.where(real, index, len(out))].set(found, mode="drop")
        states = states.at[places.entry(row, position + size - 1)].set(after)
        over = done + size >= places.counts[row]
        return number + over, jnp.where(over, 0, done + size), out, states

    start = (jnp.int32(0), jnp.int32(0), out, states)
    _, _, out, states = jax.lax.while_loop(lambda carry: carry[0] < count, body, start)
    return out, states


def step(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of each of R rows, as the rule is written.

    Args:
        q, k, v, decay, beta: as for `gated_delta`, R for T.
        state: f32 [R, H, k, v].

    Returns:
        f32 [R, H, v], and the states.
    """
    state = state * jnp.exp(decay)[..., None, None]
    known = jnp.einsum("rhk,rhkv->rhv", k, state, precision="highest")
    delta = (v - known) * beta[..., None]
    state = state + k[..., None] * delta[..., None, :]
    return jnp.einsum("rhk,rhkv->rhv", q, state, precision="highest"), state


def chunk(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """C tokens of one row at once, by the WY form of their product (arXiv:2412.06464, section 3.3).

    With ``d_i`` the decay from the state to token i and ``d_ij = d_i / d_j``, what the tokens write solves
    ``u_i = b_i (v_i - d_i k_iᵀ S - sum over j < i of d_ij (k_i · k_j) u_j)``.

    Args:
        q, k, v, decay, beta: as for `gated_delta`, C for T.
        state: f32 [H, k, v].

    Returns:
        f32 [C, H, v], and the state.
    """
    q, k, v, decay, beta = (jnp.moveaxis(x, 0, 1) for x in (q, k, v, decay, beta))  # [H, C, …]
    size = q.shape[1]
    total = jnp.cumsum(decay, axis=1)
    lower = jnp.tril(jnp.ones((size, size), bool))
    # Masked before the exponential: what is above the diagonal may overflow.
    between = jnp.exp(jnp.where(lower, total[:, :, None] - total[:, None, :], -jnp.inf))
    of_state = jnp.exp(total)[..., None]

    def product(letters: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(letters, x, y, precision="highest")

    system = product("hik,hjk->hij", k, k) * between * beta[..., None]
    right = (v - of_state * product("hik,hkv->hiv", k, state)) * beta[..., None]
    written = solve_triangular(system, right, lower=True, unit_diagonal=True)
    out = of_state * product("hik,hkv->hiv", q, state)
    out = out + product("hij,hjv->hiv", product("hik,hjk->hij", q, k) * between, written)
    left = jnp.exp(total[:, -1:] - total)[..., None]
    state = state * of_state[:, -1:] + product("hik,hiv->hkv", k * left, written)
    return jnp.moveaxis(out, 0, 1), state
