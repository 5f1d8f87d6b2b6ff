"""Attention to a few keys of each token, which an indexer has chosen (DeepSeek V3.2's sparse attention), in plain XLA
operations.

Keys of the indexer have latent pages of their own. Tokens are taken some at a time, each with the keys of its request,
and loops end where the longest request of them does.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from llmjax.kernels.attention.portable import MASKED, Partial, finish, gather, product, start_from, update, write_kv
from llmjax.kernels.attention.types import KVPages, RaggedBatch
from llmjax.kernels.loops import for_loop

TOKENS = 32  # side by side
KEYS = 256  # of each that a loop iteration gathers, at least


def best_keys(
    q: jax.Array,
    weights: jax.Array,
    k: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    *,
    scale: float,
    count: int,
) -> tuple[jax.Array, KVPages]:
    """Stores the step's keys, and finds those that each token's queries score highest: ``sum over heads of weight *
    relu(scale * q . key)``, among the keys up to the token's own.

    Args:
        q: [T, H, h], rope applied.
        weights: f32 [T, H].
        k: [T, h], rope applied.
        pages: latent, of one head and ``value_dim`` h.
        count: how many.

    Returns:
        i32 [T, count], positions, best first and then -1 where there are fewer; and the pages.
    """
    pages = write_kv(pages, k[:, None], None, batch.places(pages.page_size))
    columns = batch.page_table.shape[1]
    per_block = min(max(1, KEYS // pages.page_size), columns)
    block, most = per_block * pages.page_size, -(-columns // per_block)
    num_kept = min(count, columns * pages.page_size)
    row, position = _places(batch, len(q))

    def best(q: jax.Array, weights: jax.Array, row: jax.Array, position: jax.Array) -> jax.Array:
        def key_block(index: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            scores, places = found
            columns_here = jnp.minimum(index * per_block + jnp.arange(per_block), columns - 1)
            ids = batch.first_page + batch.page_table[row[:, None], columns_here]
            keys = gather(pages, ids, q.dtype)[0][:, 0]  # [tokens, block, h]
            place = index * block + jnp.arange(block)
            score = product("thd,tcd->thc", q, keys) * scale
            score = jnp.einsum("th,thc->tc", weights, jax.nn.relu(score), precision="highest")
            score = jnp.where(place <= position[:, None], score, -jnp.inf)
            scores = jnp.concatenate((scores, score), 1)
            places = jnp.concatenate((places, jnp.broadcast_to(place, score.shape)), 1)
            scores, at = jax.lax.top_k(scores, num_kept)
            return scores, jnp.take_along_axis(places, at, axis=1)

        nothing = jnp.full((len(q), num_kept), -jnp.inf), jnp.full((len(q), num_kept), -1, jnp.int32)
        scores, places = for_loop(0, position.max() // block + 1, key_block, nothing, most=most)
        return jnp.where(scores > -jnp.inf, places, -1)

    found = _some_at_a_time(best, q, weights.astype(jnp.float32), row, position)
    return jnp.pad(found, ((0, 0), (0, count - num_kept)), constant_values=-1), pages


def attend_chosen(
    q: jax.Array,
    k: jax.Array,
    v: None,
    pages: KVPages,
    batch: RaggedBatch,
    *,
    scale: float,
    chosen: jax.Array,
) -> tuple[jax.Array, KVPages]:
    """``llmjax.kernels.attention.attend`` over latent pages, to the keys at the positions ``chosen``, i32 [T, count],
    of each token; those below 0, which come last, are none."""
    assert v is None and pages.layout.parts == 1
    pages = write_kv(pages, k, None, batch.places(pages.page_size))
    row, _ = _places(batch, len(q))
    block = min(KEYS, chosen.shape[1])
    most = -(-chosen.shape[1] // block)
    chosen = jnp.pad(chosen, ((0, 0), (0, most * block - chosen.shape[1])), constant_values=-1)

    def attended(q: jax.Array, row: jax.Array, chosen: jax.Array) -> jax.Array:
        def key_block(index: jax.Array, partial: Partial) -> Partial:
            place = jax.lax.dynamic_slice_in_dim(chosen, index * block, block, axis=1)
            page, offset = jnp.divmod(jnp.maximum(place, 0), pages.page_size)
            page = batch.first_page + batch.page_table[row[:, None], page]
            visible = place >= 0
            keys = jnp.where(visible[..., None], _stored(pages, page, offset), 0).astype(q.dtype)
            logits = jnp.where(visible[:, None], product("thd,tcd->thc", q, keys) * scale, MASKED)
            values = keys[..., : pages.value_dim]
            return update(partial, logits, lambda w: product("thc,tcd->thd", w.astype(values.dtype), values))

        start = start_from((*q.shape[:2], pages.value_dim), None)
        longest = (chosen >= 0).sum(1).max()
        return finish(for_loop(0, -(-longest // block), key_block, start, most=most))

    return _some_at_a_time(attended, q, row, chosen).astype(q.dtype), pages


def _places(batch: RaggedBatch, tokens: int) -> tuple[jax.Array, jax.Array]:
    """The row of each token and its position, i32 [T]; padding is at -1."""
    token = jnp.arange(tokens)
    if batch.decode:
        return token, batch.kv_len - 1
    row = jnp.clip(jnp.searchsorted(batch.query_start, token, side="right") - 1, 0, len(batch.kv_len) - 1)
    position = batch.kv_len[row] - batch.query_start[row + 1] + token
    return row, jnp.where(token < batch.query_start[-1], position, -1)


def _some_at_a_time(compute: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """``compute(*arrays)``, whose first axis are tokens that have nothing to do with each other."""
    tokens = len(arrays[0])
    side_by_side = min(TOKENS, tokens)
    more = -tokens % side_by_side
    padded = (jnp.pad(x, ((0, more), *[(0, 0)] * (x.ndim - 1)), mode="edge") for x in arrays)
    blocks = tuple(x.reshape(-1, side_by_side, *x.shape[1:]) for x in padded)
    results = jax.lax.map(lambda block: compute(*block), blocks)
    return results.reshape(-1, *results.shape[2:])[:tokens]


def _stored(pages: KVPages, page: jax.Array, offset: jax.Array) -> jax.Array:
    """What latent pages ``page`` hold at ``offset``, both [...]: f32 [..., size of a key]."""
    x = pages.data[page, 0, 0, offset]
    if pages.in_words:
        x = jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1)
    x = (x if x.dtype == pages.dtype else jax.lax.bitcast_convert_type(x, pages.dtype)).astype(jnp.float32)
    if pages.calibration is not None:
        scale, zero = pages.calibration[0]
        return x * scale + zero
    if not pages.layout.token_scales:
        return x
    elements = 1 if pages.in_words else 4  # of a scale, after the values
    row, column = jnp.divmod(elements * offset[..., None] + jnp.arange(elements), pages.data.shape[-1])
    bits = pages.data[page[..., None], 0, 0, pages.page_size + row, column]
    scales = jax.lax.bitcast_convert_type(bits[..., 0] if pages.in_words else bits, jnp.float32)
    return x * scales[..., None]
