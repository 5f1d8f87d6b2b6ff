"""Products of few rows with a matrix of 16-bit floats in C++ (``src/linear.cc``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kernels.cpu.library import Library


def refuses(x: jax.Array, weight: jax.Array) -> str | None:
    """Why the kernel does not take these types and sizes; None: it does. Whether it is the fastest is not asked."""
    if weight.dtype not in (jnp.bfloat16, jnp.float16):
        return f"weights are {weight.dtype}"
    if x.shape[1] % 8:
        return f"{x.shape[1]} inputs are no multiple of 8"
    return None


def linear(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, *, library: Library, isa: str | None = None
) -> jax.Array:
    """``x @ weight.T + bias`` in f32, x not rounded to the weight's type (to 16 bits of mantissa where tiles multiply).

    Args:
        x: [T, in].
        weight: bf16 or f16 [out, in].
        bias: [out] or None.
        isa: an instruction set of the library; None: the best that the machine has.

    Returns:
        f32 [T, out].
    """
    call = jax.ffi.ffi_call("llmjax_linear", jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32))
    added = jnp.zeros(0, jnp.float32) if bias is None else bias.astype(jnp.float32)
    return call(x.astype(jnp.float32), weight, added, isa=np.int32(library.index(isa)))
