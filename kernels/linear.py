"""``linear``: the one function through which every weight matrix is applied; it dispatches on the weight's type."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.cpu import linear as cpu
from kernels.cpu.library import Library, library

CPU_MIN_ROWS = 4  # XLA's CPU dot of bfloat16 is a scalar loop for one row and a matrix product from a few rows on

# Up to this many rows the C++ kernel beats XLA's dot (benchmarks/kernels.py prints both).
CPU_MAX_KERNEL_ROWS = 4
CPU_MAX_KERNEL_ROWS_TILED = 16  # with AMX


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """``x @ weight.T + bias`` with f32 accumulation.

    Args:
        x: [T, in]; rounded to the weight's dtype, or less than that.
        weight: [out, in], the layout of Hugging Face checkpoints and of XLA's fast CPU dots.
        bias: [out] or None.

    Returns:
        [T, out] in x's dtype.
    """
    native = library() if cpu.supports(x, weight) else None
    if native is None or len(x) > _max_kernel_rows(native, weight):
        return linear_by_xla(x, weight, bias).astype(x.dtype)

    def on_cpu(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        return cpu.linear(x, weight, bias, library=native)

    return jax.lax.platform_dependent(x, weight, bias, cpu=on_cpu, default=linear_by_xla).astype(x.dtype)


def linear_by_xla(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """``linear`` in XLA operations, as f32 [T, out]."""
    rows = x.astype(weight.dtype)
    if weight.dtype.itemsize == 2 and len(x) < CPU_MIN_ROWS:
        out = jax.lax.platform_dependent(rows, weight, cpu=_few_rows_dot, default=_dot)
    else:
        out = _dot(rows, weight)
    return out if bias is None else out + bias.astype(jnp.float32)


def _max_kernel_rows(native: Library, weight: jax.Array) -> int:
    tiled = native.best == "amx" and weight.dtype == jnp.bfloat16
    return CPU_MAX_KERNEL_ROWS_TILED if tiled else CPU_MAX_KERNEL_ROWS


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    # "highest" keeps f32 products in f32 on devices that would use TF32; narrower types are not affected.
    return jax.lax.dot_general(
        x, weight, (((1,), (1,)), ((), ())), precision="highest", preferred_element_type=jnp.float32
    )


def _few_rows_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    padded = jnp.pad(x, ((0, CPU_MIN_ROWS - x.shape[0]), (0, 0)))
    return _dot(padded, weight)[: x.shape[0]]
