"""The specification of ragged paged attention: one dense matrix per token, no care for memory. The oracle of tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.attention.types import KVPages, RaggedBatch


def write_kv(pages: KVPages, k: jax.Array, v: jax.Array, slots: jax.Array) -> KVPages:
    """Stores each token's K and V at its slot.

    Args:
        k, v: [T, K, h].
        slots: i32 [T], ``page * page_size + offset``.
    """
    page, offset = slots // pages.page_size, slots % pages.page_size
    return KVPages(
        k=pages.k.at[page, :, offset].set(pages.encode(k)),
        v=pages.v.at[page, :, offset].set(pages.encode(v)),
        dtype=pages.dtype,
    )


def ragged_paged_attention(
    q: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of every token over the pages of its request; see the package for the contract.

    Args:
        q: [T, H, h].
        sinks: f32 [H], a logit that takes part in the softmax of each head and attends to nothing.

    Returns:
        [T, H, h] in q's dtype; rows of padding tokens are undefined but finite.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = pages.k.shape[1]
    rows = batch.kv_len.shape[0]
    row = jnp.clip(jnp.searchsorted(batch.query_start, jnp.arange(tokens), side="right") - 1, 0, rows - 1)  # [T]
    position = jnp.arange(tokens) - batch.query_start[row + 1] + batch.kv_len[row]  # [T]

    def keys_of(cache: jax.Array) -> jax.Array:  # [T, L, K, h]
        gathered = pages.decode(cache[batch.page_table[row]])  # [T, P, K, page, h]
        return gathered.swapaxes(2, 3).reshape(tokens, -1, kv_heads, head_dim)

    grouped = q.astype(jnp.float32).reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    logits = jnp.einsum("tkgh,tlkh->tkgl", grouped, keys_of(pages.k), precision="highest") * scale
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    key = jnp.arange(logits.shape[-1])
    visible = key[None] <= position[:, None]
    if window is not None:
        visible &= position[:, None] - key[None] < window
    logits = jnp.where(visible[:, None, None], logits, -1e30)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.reshape(1, kv_heads, -1, 1), (*logits.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([logits, sink], -1), axis=-1)[..., :-1]
    else:
        weights = jax.nn.softmax(logits, axis=-1)
    out = jnp.einsum("tkgl,tlkh->tkgh", weights, keys_of(pages.v), precision="highest")
    return out.reshape(tokens, heads, head_dim).astype(q.dtype)
