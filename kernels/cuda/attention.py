"""Ragged paged attention for CUDA: keys and values are stored, then one kernel serves decodes and one chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from llmjax.kernels.attention import portable
from llmjax.kernels.attention.types import INT32_BYTES, KVPages, RaggedBatch
from llmjax.kernels.cuda.decode import decode
from llmjax.kernels.cuda.flash import QueryRules
from llmjax.kernels.cuda.kv_write import write_kv
from llmjax.kernels.cuda.pages import MAX_HEAD_DIM, MAX_VALUE_DIM
from llmjax.kernels.cuda.prefill import prefill

CACHE_TYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2")


def refuses(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    pages: KVPages,
    batch: RaggedBatch | None = None,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    *,
    causal: bool = True,
    **_: Any,
) -> str | None:
    """Why the kernels do not take these types and sizes; None: they do."""
    head_dim, size, value = q.shape[2], pages.data.size, pages.layout.value_dim
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"activations are {q.dtype}"
    if pages.dtype.name not in CACHE_TYPES:
        return f"pages are {pages.dtype.name}"
    if batch is not None and not batch.sees_all:
        return "tokens see others than those before them"
    if pages.in_words:
        return "bytes of pages are kept as words"
    if pages.data.dtype == jnp.uint16:
        return "pages are kept as bits of two-byte floats"
    if head_dim % 8 or (value is None and head_dim > MAX_HEAD_DIM):
        return f"the head size {head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    if value is not None and (value % 8 or value > MAX_VALUE_DIM or head_dim - value > MAX_HEAD_DIM):
        return f"latent keys of {value} + {head_dim - value}: multiples of 8 up to {MAX_VALUE_DIM} + {MAX_HEAD_DIM}"
    if slopes is not None:
        return "logits have a bias by distance"
    if not causal:
        return "queries see the keys after them"
    if INT32_BYTES[0] < size and size * pages.data.dtype.itemsize <= INT32_BYTES[1]:
        return "pages of one-byte types between 2 and 4 GiB a layer are beyond Pallas' 32-bit offsets"
    return None


def store_kv(
    pages: KVPages, k: jax.Array, v: jax.Array | None, batch: RaggedBatch, *, interpret: bool = False
) -> KVPages:
    """Stores keys and values, as `write_kv` says: by it where tokens have scales, or are many."""
    if pages.layout.token_scales or not batch.decode:
        return write_kv(pages, k, v, batch, interpret=interpret)
    # XLA makes one kernel too, which takes in what made the keys, but scatters many slowly.
    return portable.write_kv(pages, k, v, batch.places(pages.page_size))


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    pages: KVPages,
    batch: RaggedBatch,
    sinks: jax.Array | None = None,
    slopes: None = None,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = True,
    softcap: float | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, KVPages]:
    """``llmjax.kernels.attention.attend``; the output of padding tokens is 0.

    Args:
        slopes, causal=False: refused.
        interpret: run the kernels as XLA operations, on any device.
    """
    pages = store_kv(pages, k, v, batch, interpret=interpret)
    rules = QueryRules(scale=scale, window=window, softcap=softcap)
    if batch.decode:
        return decode(q, pages, batch, sinks, rules=rules, interpret=interpret), pages
    tokens, rows = q.shape[0], len(batch.kv_len)
    count = jnp.diff(batch.query_start)
    single = count == 1
    out = prefill(q, pages, batch, jnp.where(single, 0, count), sinks, rules=rules, interpret=interpret)
    first = jnp.minimum(batch.query_start[:-1], tokens - 1)
    of_singles = replace(batch, kv_len=jnp.where(single, batch.kv_len, 0))
    singles = decode(q[first], pages, of_singles, sinks, rules=rules, interpret=interpret)
    token = jnp.arange(tokens)
    row = jnp.minimum(jnp.searchsorted(batch.query_start, token, side="right", method="compare_all") - 1, rows - 1)
    out = jnp.where(single[row, None, None], singles[row], out)
    return jnp.where((token < batch.query_start[-1])[:, None, None], out, 0), pages
