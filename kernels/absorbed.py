"""Projections from latent vectors to keys and values of heads, absorbed into what surrounds attention.

A key is ``W_k latent``, so ``q · key`` is ``(W_kᵀ q) · latent``, and a head's output is ``W_v`` times a mean of latent
vectors (DeepSeek-V2, arXiv:2405.04434). With an adapter, ``W`` is ``W + B A``: queries are shrunk by B's rows of keys
and expanded by A, outputs shrunk by A and expanded by B's rows of values. All tokens that a row attends to have its
adapter, so it is the row that says which. A bias of keys moves all logits of a row alike and changes nothing; one of
values is added as it is, for shares add up to one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from llmjax.kernels.adapted import Adapted, Delta, as_it_is
from llmjax.kernels.qtensor import QTensor


def into_latent(queries: jax.Array, weight: jax.Array | Adapted) -> jax.Array:
    """``W_kᵀ q`` of each head.

    Args:
        queries: [T, H, K].
        weight: [H * (K + V), R], for each head the rows of its keys before those of its values.

    Returns:
        [T, H, R] in the queries' dtype.
    """
    heads, size = queries.shape[1:]
    of_keys = _by_head(weight, heads)[:, :size]
    if not isinstance(weight, Adapted) or (delta := weight.delta) is None:
        return _product("thk,hkr->thr", queries, of_keys).astype(queries.dtype)
    _, gain = _vectors(weight, delta, heads)
    found = _product("thk,hkr->thr", queries * (1 + gain[..., :size]).astype(queries.dtype), of_keys)
    rows = delta.b.reshape(len(delta.b), heads, -1)[..., :size]
    shrunk = weight.places.only_own(_product("thk,phk->thp", queries, rows))
    return (found + _product("thp,pr->thr", shrunk, delta.a)).astype(queries.dtype)


def out_of_latent(found: jax.Array, weight: jax.Array | Adapted, *, size: int) -> jax.Array:
    """``W_v`` times what each head has found.

    Args:
        found: [T, H, R].
        weight: as for `into_latent`.
        size: rows of a head's values, V.

    Returns:
        [T, H, V] in the dtype of ``found``.
    """
    heads = found.shape[1]
    out = _product("thr,hvr->thv", found, _by_head(weight, heads)[:, -size:])
    if isinstance(weight, Adapted) and (delta := weight.delta) is not None:
        bias, gain = (part[..., -size:] for part in _vectors(weight, delta, heads))
        rows = delta.b.reshape(len(delta.b), heads, -1)[..., -size:]
        shrunk = weight.places.only_own(_product("thr,pr->thp", found, delta.a))
        out = out * (1 + gain) + _product("thp,phv->thv", shrunk, rows) + bias
    return out.astype(found.dtype)


def _by_head(weight: jax.Array | Adapted, heads: int) -> jax.Array:
    """[H, K + V, R]."""
    whole = as_it_is(weight)
    assert not isinstance(whole, QTensor), "its halves are used apart"
    return whole.reshape(heads, -1, whole.shape[1])


def _vectors(weight: Adapted, delta: Delta, heads: int) -> list[jax.Array]:
    """Biases of rows, and factors of their products less one, f32 [T, H, K + V] each."""
    assert delta.vectors is not None
    chosen = weight.places.chosen
    parts = (jnp.dot(chosen, part, precision="highest") for part in jnp.split(delta.vectors, 2))
    return [part.reshape(len(chosen), heads, -1) for part in parts]


def _product(letters: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """A product for each head, f32: XLA has no batched bf16 product on a CPU, so what is multiplied has one type."""
    return jnp.einsum(letters, x, weight.astype(x.dtype), precision="highest", preferred_element_type=jnp.float32)
