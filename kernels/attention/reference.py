"""The specification of ragged paged attention: one dense matrix per token, no care for memory. The oracle of tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from llmjax.kernels.attention.types import KVPages, RaggedBatch


def write_kv(pages: KVPages, k: jax.Array, v: jax.Array | None, kv_index: jax.Array) -> KVPages:
    """Stores each token's K and V at its place.

    Args:
        k, v: [T, K, h]; v None for latent pages.
        kv_index: i32 [T], ``page * page_size + offset``.
    """
    page, offset = kv_index // pages.page_size, kv_index % pages.page_size
    values, scales = pages.encode(k, v)
    data = pages.data.at[page, :, :, offset].set(values)
    if scales is not None:
        flat = data.reshape(*data.shape[:3], -1)
        byte = pages.page_size * data.shape[-1] + 4 * offset[:, None] + jnp.arange(4)  # [T, 4]
        stored = jax.lax.bitcast_convert_type(scales, jnp.uint8)  # [T, 2, K, 4]
        flat = flat.at[page[:, None], :, :, byte].set(stored.transpose(0, 3, 1, 2))
        data = flat.reshape(data.shape)
    return pages.with_data(data)


def ragged_paged_attention(
    q: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of every token over the pages of its request; see the package for the contract.

    Args:
        q: [T, H, h].
        sinks: f32 [H], a logit that takes part in the softmax of each head and attends to nothing.
        slopes: f32 [H], what a logit loses a token of distance.

    Returns:
        [T, H, size of a value] in q's dtype; rows of padding tokens are undefined but finite.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = pages.data.shape[2]
    rows = batch.kv_len.shape[0]
    row = jnp.clip(jnp.searchsorted(batch.query_start, jnp.arange(tokens), side="right") - 1, 0, rows - 1)  # [T]
    position = jnp.arange(tokens) - batch.query_start[row + 1] + batch.kv_len[row]  # [T]

    records = pages.data[batch.page_table[row]].transpose(2, 0, 1, 3, 4, 5)  # [2, T, P, K, rows, h]
    found = (x.swapaxes(2, 3) for x in pages.keys_and_values(records))  # [T, P, page, K, h]
    keys, values = (x.reshape(tokens, -1, kv_heads, x.shape[-1]) for x in found)  # [T, L, K, h]
    grouped = q.astype(jnp.float32).reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    logits = jnp.einsum("tkgh,tlkh->tkgl", grouped, keys, precision="highest") * scale
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    key = jnp.arange(logits.shape[-1])
    if slopes is not None:
        distance = (position[:, None] - key[None]).astype(jnp.float32)  # [T, L]
        logits = logits - slopes.reshape(1, kv_heads, -1, 1) * distance[:, None, None]
    visible = key[None] <= position[:, None]
    if window is not None:
        visible &= position[:, None] - key[None] < window
    logits = jnp.where(visible[:, None, None], logits, -1e30)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.reshape(1, kv_heads, -1, 1), (*logits.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([logits, sink], -1), axis=-1)[..., :-1]
    else:
        weights = jax.nn.softmax(logits, axis=-1)
    out = jnp.einsum("tkgl,tlkh->tkgh", weights, values, precision="highest")
    return out.reshape(tokens, heads, -1).astype(q.dtype)
