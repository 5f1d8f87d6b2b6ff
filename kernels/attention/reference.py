"""The specification of ragged paged attention: row after row, in NumPy and f64. The oracle of tests."""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.attention.types import LEAST_AMAX, KVPages, RaggedBatch

Array: TypeAlias = jax.Array | np.ndarray

LEAST = -1e30  # of logits, so that a token that sees none gets zeros


def write_kv(pages: KVPages, k: Array, v: Array | None, places: Array) -> KVPages:
    """Stores each token's K and V at its place.

    Args:
        k, v: [T, K, h]; v None for latent pages.
        places: i32 [T], see ``RaggedBatch.places``.
    """
    assert (v is None) == (pages.layout.parts == 1)
    x = np.stack([np.asarray(part, np.float32) for part in (k, v) if part is not None], axis=1)  # [T, parts, K, h]
    page, offset = np.divmod(np.asarray(places), pages.page_size)
    data, scales = np.array(pages.data), None
    if pages.dtype.itemsize == 1:
        x, scales = _scaled(x, pages)
    with np.errstate(invalid="ignore"):  # NaN as an integer is any
        data[page, :, :, offset] = x.astype(pages.dtype).view(data.dtype)
    if scales is not None:
        records = data.reshape(*data.shape[:3], -1)
        byte = pages.page_size * data.shape[-1] + 4 * offset[:, None] + np.arange(4)  # [T, 4]
        records[page[:, None], :, :, byte] = scales.view(np.uint8).transpose(0, 3, 1, 2)
    return pages.with_data(jnp.asarray(data))


def ragged_paged_attention(
    q: Array,
    pages: KVPages,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = True,
    softcap: float | None = None,
    sinks: Array | None = None,
    slopes: Array | None = None,
) -> np.ndarray:
    """Attention of every token over the pages of its request; see the package for the contract.

    Args:
        q: [T, H, h].
        sinks: f32 [H], a logit that takes part in the softmax of each head and attends to nothing.
        slopes: f32 [H], what a logit loses a token of distance.

    Returns:
        f32 [T, H, size of a value]; 0 for padding tokens.
    """
    queries = np.asarray(q, np.float64).swapaxes(0, 1)  # [H, T, h]
    keys, values = _keys_and_values(pages)
    page_table, start = np.asarray(batch.first_page + batch.page_table), np.asarray(batch.query_start)
    repeats = len(queries) // keys.shape[1]
    out = np.zeros((*queries.shape[:2], values.shape[-1]), np.float32)
    for row, length in enumerate(np.asarray(batch.kv_len)):
        if not length:
            continue
        tokens, position = slice(start[row], start[row + 1]), np.arange(length)
        place = page_table[row, position // pages.page_size] * pages.page_size + position % pages.page_size
        seen_keys, seen_values = (np.repeat(x[place].swapaxes(0, 1), repeats, axis=0) for x in (keys, values))
        logits = queries[:, tokens] @ seen_keys.swapaxes(1, 2) * scale  # [H, tokens of the row, length]
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        behind = position[length - logits.shape[1] :, None] - position  # tokens of distance
        if slopes is not None:
            logits = logits - np.asarray(slopes)[:, None, None] * np.abs(behind)
        visible = (behind >= 0) if causal else np.ones_like(behind, bool)
        if batch.last_key is not None:
            last = np.asarray(batch.last_key)[tokens]
            of_key = np.full(length, -1)
            of_key[length - len(last) :] = last
            visible = visible | ((position <= last[:, None]) & (of_key == last[:, None]))
        visible = visible & (position >= batch.first_key)
        if batch.end_key is not None:
            visible = visible & (position < batch.end_key)
        if window is not None:
            visible = visible & ((behind if causal else np.abs(behind)) < window)
        logits = np.where(visible, logits, -np.inf)
        largest = np.maximum(logits.max(-1, keepdims=True), LEAST)
        attended_to_nothing = 0.0 if sinks is None else np.exp(np.asarray(sinks)[:, None, None] - largest)
        weights = np.exp(logits - largest)
        total = weights.sum(-1, keepdims=True) + attended_to_nothing
        out[:, tokens] = weights @ seen_values / np.where(total == 0, 1, total)
    return out.swapaxes(0, 1)


def _scaled(x: np.ndarray, pages: KVPages) -> tuple[np.ndarray, np.ndarray | None]:
    """``KVLayout.scaled``, rounded to integers where the type has no others; scales f32 [T, parts, K, 1]."""
    largest, scales = np.float32(pages.layout.max_value), None
    if pages.calibration is not None:
        scale, zero = np.asarray(pages.calibration).swapaxes(0, 1)[..., None, None]
        x = (x - zero) * (1 / scale)
    else:
        scales = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(LEAST_AMAX)) * (1 / largest)
        x = x * (1 / scales)
    x = np.clip(x, -largest, largest)
    return (np.round(x) if pages.dtype == np.int8 else x), scales


def _keys_and_values(pages: KVPages) -> tuple[np.ndarray, np.ndarray]:
    """What every place holds, f64 [N * page_size, K, size of each]."""
    data, size = np.asarray(pages.data), pages.page_size
    x = data[..., :size, :].view(pages.dtype).astype(np.float64)  # [N, parts, K, page_size, h]
    if pages.calibration is not None:
        scale, zero = np.asarray(pages.calibration, np.float64).swapaxes(0, 1)[..., None, None, None]
        x = x * scale + zero
    elif pages.layout.token_scales:
        records = np.ascontiguousarray(data.reshape(*data.shape[:3], -1)[..., size * data.shape[-1] :])
        x = x * records[..., : 4 * size].view(np.float32)[..., None]
    x = x.transpose(1, 0, 3, 2, 4).reshape(x.shape[1], -1, x.shape[2], x.shape[-1])
    return x[0], x[-1][..., : pages.value_dim]
