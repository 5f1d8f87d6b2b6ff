"""Recurrent mixers in C++ (``src/recurrent.cc``); entries of states out of range are errors, not stray writes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.attention.types import RaggedBatch
from llmjax.kernels.cpu.library import library

MAX_WIDTH = 256  # of a convolution


def refuses(*_: Any, **__: Any) -> str | None:
    """Why there is no kernel; None: there is one, for all sizes."""
    return None if library() is not None else "not built"


def refuses_convolution(x: jax.Array, weight: jax.Array, *_: Any, **__: Any) -> str | None:
    """Why the kernel does not take a convolution; None: it does."""
    if weight.shape[1] > MAX_WIDTH:
        return f"the convolution is {weight.shape[1]} tokens wide, more than {MAX_WIDTH}"
    return refuses()


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
    """``llmjax.kernels.recurrent.gated_delta.gated_delta`` by the library; with a decay of each channel, [T, H, k],
    ``channel_delta.channel_delta``.

    """
    tokens = (q, k, v, decay, beta)
    return _call("llmjax_recurrence", tokens, states, batch, out=v.shape, page_size=page_size)


def linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    states: jax.Array,
    batch: RaggedBatch,
    *,
    page_size: int,
) -> tuple[jax.Array, jax.Array]:
    """``llmjax.kernels.recurrent.linear_attention.linear_attention`` by the library."""
    without = jnp.zeros(0, jnp.float32)  # where no token says how much of it is written
    return gated_delta(q, k, v, decay, without, states, batch, page_size=page_size)


def selective_scan(
    c: jax.Array,
    b: jax.Array,
    x: jax.Array,
    steps: jax.Array,
    rates: jax.Array,
    states: jax.Array,
    batch: RaggedBatch,
    *,
    page_size: int,
) -> tuple[jax.Array, jax.Array]:
    """``llmjax.kernels.recurrent.selective_scan.selective_scan`` by the library."""
    inputs = (c, b, x, steps, rates)
    return _call("llmjax_selective_scan", inputs, states, batch, out=x.shape, page_size=page_size)


def causal_convolution(
    x: jax.Array,
    weight: jax.Array,
    states: jax.Array,
    batch: RaggedBatch,
    *,
    page_size: int,
) -> tuple[jax.Array, jax.Array]:
    """``llmjax.kernels.recurrent.convolution.causal_convolution`` by the library."""
    return _call("llmjax_convolution", (x, weight), states, batch, out=x.shape, page_size=page_size)


def _call(
    target: str,
    given: tuple[jax.Array, ...],
    states: jax.Array,
    batch: RaggedBatch,
    *,
    out: tuple[int, ...],
    page_size: int,
) -> tuple[jax.Array, jax.Array]:
    call = jax.ffi.ffi_call(
        target,
        (jax.ShapeDtypeStruct(out, jnp.float32), jax.ShapeDtypeStruct(states.shape, states.dtype)),
        input_output_aliases={len(given): 1},
    )
    rows = (batch.query_start, batch.kv_len, batch.page_table, jnp.asarray(batch.first_page, jnp.int32))
    read, after = call(
        *given,
        states,
        *rows,
        page_size=np.int32(page_size),
        decode=batch.decode,
    )
    return read, after
