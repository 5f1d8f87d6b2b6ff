"""Ragged paged attention in plain XLA operations, for any device without a kernel of its own.

Online softmax over blocks of keys (Dao et al. 2022, arXiv:2205.14135), so no matrix grows with the page table. Loop
lengths follow the data, not the bucket: a step costs what its longest request needs. Rows with one token (decodes)
run batched over requests; rows with more run query block by query block.

Products are of numbers in the queries' type, added up in f32: softmax weights are rounded to it, as kernels made for a
device do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from llmjax.kernels.attention.types import KVPages, RaggedBatch
from llmjax.kernels.loops import for_loop

KEY_BLOCK = 256  # keys a loop iteration gathers, at least
QUERY_BLOCK = 128  # queries of one request that share the gathered keys
MASKED = -1e30  # finite, so that a row with no visible key yields zeros and not NaN


@dataclass(frozen=True)
class _QueryRules:
    """What every query obeys."""

    scale: float
    window: int | None
    causal: bool
    softcap: float | None
    sinks: jax.Array | None  # f32 [H]
    slopes: jax.Array | None  # f32 [H]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Partial:
    """Online-softmax state of queries: [..., K, G] and [..., K, G, h]."""

    peak: jax.Array
    total: jax.Array
    acc: jax.Array


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    pages: KVPages,
    batch: RaggedBatch,
    sinks: jax.Array | None,
    slopes: jax.Array | None = None,
    *,
    scale: float,
    window: int | None,
    causal: bool = True,
    softcap: float | None,
) -> tuple[jax.Array, KVPages]:
    """Write, then attention (contract: ``llmjax.kernels.attention.attend``)."""
    pages = write_kv(pages, k, v, batch.places(pages.page_size))
    out = ragged_paged_attention(
        q, pages, batch, scale=scale, window=window, causal=causal, softcap=softcap, sinks=sinks, slopes=slopes
    )
    return out, pages


def write_kv(pages: KVPages, k: jax.Array, v: jax.Array | None, places: jax.Array) -> KVPages:
    """Stores each token's K and V ([T, K, h], V None for latent pages) at its place (i32 [T], see
    ``RaggedBatch.places``)."""
    _, parts, kv_heads, _, columns = pages.data.shape
    # Indexed as it is: XLA copies all pages to and from a flat view that leaves out a dimension of size 1.
    page, offset = (x[:, None, None] for x in jnp.divmod(places, pages.page_size))
    part, head = jnp.arange(parts)[:, None], jnp.arange(kv_heads)
    values, scales = pages.encode(k, v)
    data = pages.data.at[page, part, head, offset].set(values)
    if scales is not None:
        elements = 1 if pages.in_words else 4  # of a scale, after the values
        row, column = jnp.divmod(elements * offset[..., None] + jnp.arange(elements), columns)
        stored = jax.lax.bitcast_convert_type(scales, data.dtype).reshape(*scales.shape, elements)  # [T, parts, K, ·]
        at = (page[..., None], part[..., None], head[:, None], pages.page_size + row, column)
        data = data.at[at].set(stored)
    return pages.with_data(data)


def ragged_paged_attention(
    q: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = True,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
) -> jax.Array:
    """Attention of every token over the pages of its request (contract: ``llmjax.kernels.attention.attend``)."""
    rules = _QueryRules(scale=scale, window=window, causal=causal, softcap=softcap, sinks=sinks, slopes=slopes)
    tokens, _, head_dim = q.shape
    grouped = q.reshape(tokens, pages.data.shape[2], -1, head_dim)  # [T, K, G, h]
    shape = (*q.shape[:2], pages.value_dim)
    if batch.decode:
        return _decode(grouped, pages, batch, rules).reshape(shape).astype(q.dtype)
    count = jnp.diff(batch.query_start)
    single = count == 1
    out = _prefill(grouped, pages, batch, jnp.where(single, 0, count), rules)
    first = jnp.minimum(batch.query_start[:-1], tokens - 1)
    decodes = replace(batch, kv_len=jnp.where(single, batch.kv_len, 0))
    decoded = _decode(grouped[first], pages, decodes, rules)
    out = out.at[jnp.where(single, first, tokens)].set(decoded, mode="drop")
    return out.reshape(shape).astype(q.dtype)


def _decode(q: jax.Array, pages: KVPages, batch: RaggedBatch, rules: _QueryRules) -> jax.Array:
    """One query a row: q [R, K, G, h] at position kv_len - 1; returns [R, K, G, size of a value]."""
    page_size = pages.page_size
    per_block = _pages_per_block(pages, batch)
    block = per_block * page_size
    position = batch.kv_len - 1  # [R]
    first_key = jnp.full_like(position, batch.first_key)
    if rules.window is not None:
        first_key = jnp.maximum(position - rules.window + 1, first_key)
    first_page = first_key // page_size  # each row starts its loop at its own first visible page
    end = batch.kv_len if batch.end_key is None else jnp.minimum(batch.kv_len, batch.end_key)
    blocks = jnp.max((end - first_page * page_size + block - 1) // block, initial=0)
    slopes = None if rules.slopes is None else rules.slopes.reshape(*q.shape[1:3], 1)

    def body(index: jax.Array, partial: Partial) -> Partial:
        page = first_page[:, None] + index * per_block + jnp.arange(per_block)  # [R, per_block]
        ids = jnp.take_along_axis(batch.page_table, jnp.minimum(page, batch.page_table.shape[1] - 1), axis=1)
        keys, values = gather(pages, batch.first_page + ids, q.dtype)  # [R, K, C, h]
        key = (first_page * page_size + index * block)[:, None] + jnp.arange(block)  # [R, C]
        visible = (key < end[:, None]) & (key >= first_key[:, None])
        values = jnp.where(visible[:, None, :, None], values, 0.0)  # a weight of 0 does not keep NaN out
        logits = product("rkgh,rkch->rkgc", q, keys)
        logits = _biased(_cap(logits, rules), slopes, (position[:, None] - key)[:, None, None])
        logits = jnp.where(visible[:, None, None], logits, MASKED)
        return update(partial, logits, lambda w: product("rkgc,rkch->rkgh", w.astype(values.dtype), values))

    sinks = None if rules.sinks is None else rules.sinks.reshape(q.shape[1:3])
    most = _most_blocks(batch, per_block, page_size, None if rules.window is None else rules.window + page_size - 1)
    return finish(for_loop(0, blocks, body, start_from((*q.shape[:3], pages.value_dim), sinks), most=most))


def _prefill(q: jax.Array, pages: KVPages, batch: RaggedBatch, count: jax.Array, rules: _QueryRules) -> jax.Array:
    """Rows of several queries: q [T, K, G, h], row r has ``count[r]`` of them; returns f32 [T, K, G, size of a value],
    zero elsewhere."""
    tokens, kv_heads, group, head_dim = q.shape
    page_size = pages.page_size
    queries = min(QUERY_BLOCK, tokens)
    per_block = _pages_per_block(pages, batch)
    block = per_block * page_size
    ends = jnp.cumsum((count + queries - 1) // queries)  # query blocks up to and with row r
    padded = jnp.pad(q, ((0, queries), (0, 0), (0, 0), (0, 0)))
    table = jnp.pad(batch.page_table, ((0, 0), (0, per_block)))  # so that a slice never slides back
    further = None if batch.last_key is None else jnp.pad(batch.last_key, (0, queries))
    slopes = None if rules.slopes is None else rules.slopes.reshape(kv_heads, group, 1, 1)
    seen = None if rules.window is None else rules.window * (1 if rules.causal else 2) + queries
    most = _most_blocks(batch, per_block, page_size, seen) + 1  # the first block may begin before the first key

    def query_block(index: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.searchsorted(ends, index, side="right")
        within = index - jnp.where(row > 0, ends[row - 1], 0)
        start = batch.query_start[row] + within * queries
        position = batch.kv_len[row] - count[row] + within * queries + jnp.arange(queries)  # [Q]
        position = jnp.minimum(position, batch.kv_len[row] - 1)  # the tail of the last block is overwritten or dropped
        mine = jax.lax.dynamic_slice_in_dim(padded, start, queries).transpose(1, 2, 0, 3)  # [K, G, Q, h]
        mine = mine.reshape(kv_heads, group * queries, head_dim)
        first_key = batch.first_key
        if rules.window is not None:
            first_key = jnp.maximum(position[0] - rules.window + 1, first_key)
        reach = position  # last key that each query sees
        last_key = position[-1] if rules.causal else batch.kv_len[row] - 1
        if further is not None:
            own = jax.lax.dynamic_slice_in_dim(further, start, queries)
            reach = jnp.clip(own, position, batch.kv_len[row] - 1)
            last_key = jnp.max(reach)
        if not rules.causal and rules.window is not None:
            last_key = jnp.minimum(last_key, position[-1] + rules.window - 1)
        if batch.end_key is not None:
            last_key = jnp.minimum(last_key, batch.end_key - 1)

        def key_block(index: jax.Array, partial: Partial) -> Partial:
            ids = jax.lax.dynamic_slice(table, (row, index * per_block), (1, per_block))
            keys, values = (x[0] for x in gather(pages, batch.first_page + ids, q.dtype))  # [K, C, h]
            key = index * block + jnp.arange(block)
            values = jnp.where(((key >= first_key) & (key <= last_key))[:, None], values, 0.0)  # as in `_decode`
            visible = key[None] <= (reach[:, None] if rules.causal else last_key)  # [Q, C]
            if further is not None:  # later keys are of this step, and seen by those that they see
                at = batch.query_start[row] + key - (batch.kv_len[row] - count[row])
                of_key = further[jnp.clip(at, 0, len(further) - 1)]
                visible &= (key[None] <= position[:, None]) | (of_key[None] == own[:, None])
            visible &= (key >= first_key) & (key <= last_key)
            if rules.window is not None:
                visible &= key[None] > position[:, None] - rules.window
                if further is None:  # a span may reach beyond the window
                    visible &= key[None] < position[:, None] + rules.window
            logits = product("kqh,kch->kqc", mine, keys)
            logits = _cap(logits, rules).reshape(kv_heads, group, queries, block)
            logits = _biased(logits, slopes, jnp.abs(position[:, None] - key))
            logits = jnp.where(visible, logits, MASKED)

            def weigh(weights: jax.Array) -> jax.Array:
                flat = weights.reshape(kv_heads, group * queries, block).astype(values.dtype)
                return product("kqc,kch->kqh", flat, values).reshape(partial.acc.shape)

            return update(partial, logits, weigh)

        sinks = None if rules.sinks is None else rules.sinks.reshape(kv_heads, group, 1)
        start_state = start_from((kv_heads, group, queries, pages.value_dim), sinks)
        state = for_loop(first_key // block, last_key // block + 1, key_block, start_state, most=most)
        result = finish(state)
        return jax.lax.dynamic_update_slice_in_dim(out, result.transpose(2, 0, 1, 3), start, 0)

    out = jnp.zeros((*padded.shape[:3], pages.value_dim), jnp.float32)
    # Every row may have a block of queries that is not full.
    out = for_loop(0, ends[-1], query_block, out, most=tokens // queries + min(len(count), tokens // 2))
    return out[:tokens]


def _pages_per_block(pages: KVPages, batch: RaggedBatch) -> int:
    return min(max(1, KEY_BLOCK // pages.page_size), batch.page_table.shape[1])


def _most_blocks(batch: RaggedBatch, per_block: int, page_size: int, keys: int | None) -> int:
    """Blocks that hold all that a row may see: ``keys`` (None: any number) of the tokens in its page table."""
    pages = batch.page_table.shape[1]
    return -(-(pages if keys is None else min(pages, -(-keys // page_size))) // per_block)


def product(letters: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """A product of one type's numbers, in f32. "highest" keeps f32 where a device would use less; others are exact."""
    return jnp.einsum(letters, x, y, precision="highest", preferred_element_type=jnp.float32)


def gather(pages: KVPages, ids: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Keys and values of pages ``ids`` [R, n], [R, K, n * page_size, h] in ``dtype``."""
    num_pages, parts, kv_heads, rows, columns = pages.data.shape
    flat = pages.data.reshape(num_pages * parts * kv_heads, rows, columns)
    part, heads = jnp.arange(parts)[:, None, None, None], jnp.arange(kv_heads)[:, None]
    records = flat[(ids[:, None, :] * parts + part) * kv_heads + heads]  # [parts, R, K, n, rows, h]: not transposed
    numbers = (x.astype(dtype) for x in pages.keys_and_values(records))
    keys, values = (x.reshape(len(ids), kv_heads, -1, x.shape[-1]) for x in numbers)
    return keys, values


def _cap(logits: jax.Array, rules: _QueryRules) -> jax.Array:
    logits = logits * rules.scale
    return logits if rules.softcap is None else rules.softcap * jnp.tanh(logits / rules.softcap)


def _biased(logits: jax.Array, slopes: jax.Array | None, distance: jax.Array) -> jax.Array:
    """Logits less ``slopes * distance`` (ALiBi), which broadcasts to them; distances are in tokens."""
    return logits if slopes is None else logits - slopes * distance.astype(jnp.float32)


def start_from(shape: tuple[int, ...], sinks: jax.Array | None) -> Partial:
    """Nothing seen yet, or only the sink: a logit without a value. ``sinks`` broadcasts to ``shape[:-1]``."""
    if sinks is None:
        return Partial(peak=jnp.full(shape[:-1], MASKED), total=jnp.zeros(shape[:-1]), acc=jnp.zeros(shape))
    peak = jnp.broadcast_to(sinks.astype(jnp.float32), shape[:-1])
    return Partial(peak=peak, total=jnp.ones(shape[:-1]), acc=jnp.zeros(shape))


def update(partial: Partial, logits: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> Partial:
    """Takes in one block of logits [..., C]; ``weigh`` multiplies softmax weights with the block's values."""
    peak = jnp.maximum(partial.peak, logits.max(-1))
    weights = jnp.where(logits > MASKED, jnp.exp(logits - peak[..., None]), 0.0)
    shrink = jnp.exp(partial.peak - peak)
    return Partial(
        peak=peak,
        total=partial.total * shrink + weights.sum(-1),
        acc=partial.acc * shrink[..., None] + weigh(weights),
    )


def finish(partial: Partial) -> jax.Array:
    return partial.acc / jnp.maximum(partial.total, 1e-30)[..., None]
