"""``linear``: the one function through which every weight matrix is applied; it dispatches on the weight's type."""

from __future__ import annotations

import jax
import jax.numpy as jnp

CPU_MIN_ROWS = 4  # XLA's CPU dot of bfloat16 is a scalar loop for one row and a matrix product from a few rows on


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """``x @ weight.T + bias`` with f32 accumulation.

    Args:
        x: [T, in]; rounded to the weight's dtype.
        weight: [out, in], the layout of Hugging Face checkpoints and of XLA's fast CPU dots.
        bias: [out] or None.

    Returns:
        [T, out] in x's dtype.
    """
    rows = x.astype(weight.dtype)
    if weight.dtype.itemsize == 2 and x.shape[0] < CPU_MIN_ROWS:
        out = jax.lax.platform_dependent(rows, weight, cpu=_few_rows_dot, default=_dot)
    else:
        out = _dot(rows, weight)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(x.dtype)


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    # "highest" keeps f32 products in f32 on devices that would use TF32; narrower types are not affected.
    return jax.lax.dot_general(
        x, weight, (((1,), (1,)), ((), ())), precision="highest", preferred_element_type=jnp.float32
    )


def _few_rows_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    padded = jnp.pad(x, ((0, CPU_MIN_ROWS - x.shape[0]), (0, 0)))
    return _dot(padded, weight)[: x.shape[0]]
