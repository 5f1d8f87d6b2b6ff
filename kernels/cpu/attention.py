"""Ragged paged attention in C++ (``src/attention.cc``)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.attention.types import KVPages, RaggedBatch

CACHE_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "float8_e4m3fn": 4, "float8_e5m2": 5}
MIN_HEAD_DIVISOR = 8  # what the narrowest of AVX's vectors hold; the baseline takes any multiple of 4


def refuses(q: jax.Array, pages: KVPages) -> str | None:
    """Why the kernel does not take these types and sizes; None: it does."""
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"activations are {q.dtype}"
    if pages.dtype.name not in CACHE_TYPES:
        return f"pages are {pages.dtype.name}"
    if pages.in_words:
        return "bytes of pages are kept as words"
    for size in (q.shape[-1], pages.value_dim):
        if size % MIN_HEAD_DIVISOR:
            return f"the head size {size} is not a multiple of {MIN_HEAD_DIVISOR}"
    return None


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    pages: KVPages,
    batch: RaggedBatch,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = True,
    softcap: float | None = None,
) -> tuple[jax.Array, KVPages]:
    """``llmjax.kernels.attention.attend`` by the library. A page or place out of range is an error."""
    data = pages.data
    call = jax.ffi.ffi_call(
        "llmjax_attention",
        (jax.ShapeDtypeStruct((*q.shape[:2], pages.value_dim), q.dtype), jax.ShapeDtypeStruct(data.shape, data.dtype)),
        input_output_aliases={3: 1},
    )
    rules = attributes(pages, batch, scale=scale, window=window, causal=causal, softcap=softcap)
    rules |= {"value_dim": np.int32(pages.layout.value_dim or 0)}
    v = jnp.zeros(0, q.dtype) if v is None else v.astype(q.dtype)
    out, data = call(q, k.astype(q.dtype), v, *buffers(pages, batch, sinks), **rules)
    return out, pages.with_data(data)


def buffers(pages: KVPages, batch: RaggedBatch, sinks: jax.Array | None) -> list[jax.Array]:
    """The arguments of a call beside q, k and v, the pages' data first."""
    nothing = jnp.zeros(0, jnp.float32)
    return [
        pages.data,
        nothing if pages.calibration is None else pages.calibration,
        batch.query_start,
        batch.kv_len,
        batch.page_table,
        batch.kv_index,
        jnp.asarray(batch.first_page, jnp.int32),
        nothing if sinks is None else sinks.astype(jnp.float32),
    ]


def attributes(
    pages: KVPages,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = True,
    softcap: float | None = None,
) -> dict[str, Any]:
    """The attributes of a call besides the instruction set."""
    return {
        "scale": np.float32(scale),
        "softcap": np.float32(softcap or 0),
        "window": np.int32(window or 0),
        "causal": causal,
        "cache_type": np.int32(CACHE_TYPES[pages.dtype.name]),
        "page_size": np.int32(pages.page_size),
        "token_scales": pages.layout.token_scales,
        "decode": batch.decode,
        "verify": batch.verify,
    }
