"""The largest entry of each row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from llmjax.kernels.cpu import sampling as cpu
from llmjax.kernels.cpu.library import library
from llmjax.kernels.registry import Implementation, Operation


def argmax(x: jax.Array) -> jax.Array:
    """i32 [R]: the largest entry's index, the lowest among equals; 0 for rows with NaN.

    Args:
        x: f32 [R, V].
    """
    out: jax.Array = ARGMAX(x)
    return out


def argmax_by_reductions(x: jax.Array) -> jax.Array:
    """Two plain reductions: XLA's argmax is one over pairs, which it does not vectorize."""
    index = jnp.arange(x.shape[-1], dtype=jnp.int32)
    first = jnp.min(jnp.where(x == jnp.max(x, axis=-1, keepdims=True), index, x.shape[-1]), axis=-1)
    return jnp.where(first < x.shape[-1], first, 0)


def _native_refuses(x: jax.Array) -> str | None:
    return None if library() is not None else "not built"


ARGMAX = Operation(
    "argmax",
    (
        Implementation("C++", cpu.argmax, platform="cpu", refuses=_native_refuses),
        Implementation("XLA", argmax_by_reductions),
    ),
)
