"""Zeros from the system's own pages (``src/zeros.cc``)."""

from __future__ import annotations

import jax


def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    """``llmjax.kernels.zeros.zeros`` by the library, which must be loaded."""
    # As if it had a side effect: XLA would take two equal calls for one, and copy what it makes.
    out: jax.Array = jax.ffi.ffi_call("llmjax_zeros", like, has_side_effect=True)()
    return out
