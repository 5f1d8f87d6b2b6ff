"""Which rows are numbers throughout."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from llmjax.kernels.cpu import sampling as cpu
from llmjax.kernels.cpu.library import library
from llmjax.kernels.registry import Implementation, Operation


def finite_rows(x: jax.Array) -> jax.Array:
    """bool [R]: rows that have neither NaN nor infinity.

    Args:
        x: f32 [R, V].
    """
    out: jax.Array = FINITE(x)
    return out


def finite_by_reduction(x: jax.Array) -> jax.Array:
    """XLA for CPUs writes what it compares to memory first, and reduces that entry by entry."""
    return jnp.all(jnp.isfinite(x), axis=1)


def _native_refuses(x: jax.Array) -> str | None:
    return None if library() is not None else "not built"


FINITE = Operation(
    "finite",
    (
        Implementation("C++", cpu.finite_rows, platform="cpu", refuses=_native_refuses),
        Implementation("XLA", finite_by_reduction),
    ),
)
