"""Large arrays of zeros, most of which may never be written."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import jax.typing

from llmjax.kernels.cpu import zeros as cpu
from llmjax.kernels.cpu.library import library
from llmjax.kernels.registry import Implementation, Operation


def zeros(shape: Sequence[int], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Like ``jnp.zeros``; on a CPU memory is taken, and cleared, only when it is first written."""
    out: jax.Array = ZEROS(like=jax.ShapeDtypeStruct(tuple(shape), dtype))
    return out


def _written(*, like: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(like.shape, like.dtype)


def _native_refuses(*, like: jax.ShapeDtypeStruct) -> str | None:
    return None if library() is not None else "not built"


ZEROS = Operation(
    "zeros",
    (
        Implementation("C++", lambda *, like: cpu.zeros(like), platform="cpu", refuses=_native_refuses),
        Implementation("XLA", _written),
    ),
)
