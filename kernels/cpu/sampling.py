"""Tokens from rows of logits in C++ (``src/sampling.cc``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.cpu.library import Library


def argmax(x: jax.Array, *, native: Library, isa: str | None = None) -> jax.Array:
    """``llmjax.kernels.argmax.argmax`` by the library.

    Args:
        isa: one of its instruction sets; None: the best that the machine has.
    """
    call = jax.ffi.ffi_call("llmjax_argmax", jax.ShapeDtypeStruct(x.shape[:1], jnp.int32))
    out: jax.Array = call(x, isa=np.int32(native.index(isa)))
    return out


def finite_rows(x: jax.Array, *, native: Library, isa: str | None = None) -> jax.Array:
    """``llmjax.kernels.finite.finite_rows`` by the library.

    Args:
        isa: one of its instruction sets; None: the best that the machine has.
    """
    call = jax.ffi.ffi_call("llmjax_finite", jax.ShapeDtypeStruct(x.shape[:1], jnp.bool_))
    out: jax.Array = call(x, isa=np.int32(native.index(isa)))
    return out


def sample(
    x: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    min_p: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    *,
    native: Library,
    isa: str | None = None,
) -> jax.Array:
    """``llmjax.sampling.draw.draw`` by the library.

    Args:
        isa: one of its instruction sets; None: the best that the machine has.
    """
    call = jax.ffi.ffi_call("llmjax_sample", jax.ShapeDtypeStruct(x.shape[:1], jnp.int32))
    out: jax.Array = call(x, keys, temperature, min_p, top_k, top_p, isa=np.int32(native.index(isa)))
    return out
