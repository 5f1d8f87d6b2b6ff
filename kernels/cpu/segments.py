"""Attention of tokens to those of their segment in C++ (``src/segments.cc``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

FILLED_UP = 32  # to multiples of which heads are at most filled up, as kWidest says


def refuses(q: jax.Array, dtype: jnp.dtype) -> str | None:
    """Why the kernel does not take these types; None: it does."""
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"activations are {q.dtype}"
    return None if dtype in (jnp.float32, jnp.bfloat16) else f"products are of {dtype}"


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, *, scale: float, dtype: jnp.dtype
) -> jax.Array:
    """``llmjax.kernels.attention.segments.attend_segments`` by the library."""
    tokens, heads, size = q.shape
    results = (jax.ShapeDtypeStruct(q.shape, q.dtype), room(heads, tokens, size, dtype))
    call = jax.ffi.ffi_call("llmjax_segments", results)
    out: jax.Array = call(q, k.astype(q.dtype), v.astype(q.dtype), segments, scale=np.float32(scale))[0]
    return out


def room(heads: int, tokens: int, size: int, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    """The result of a call in which keys and values are stored."""
    return jax.ShapeDtypeStruct((heads, 2, tokens, -(-size // FILLED_UP) * FILLED_UP), dtype)
