"""What adapters change of products, in C++ (``src/adapted.cc``)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from llmjax.kernels.adapted import Delta, Places
from llmjax.kernels.cpu import matrices
from llmjax.kernels.cpu.library import library


def refuses(product: jax.Array, x: jax.Array, delta: Delta, *_: Any) -> str | None:
    """Why the library does not take these types; None: it does."""
    if library() is None:
        return "not built"
    return None if delta.a.dtype in (jnp.float32, jnp.bfloat16, jnp.float16) else f"adapters are {delta.a.dtype}"


def changed(product: jax.Array, x: jax.Array, delta: Delta, places: Places, used: jax.Array | None = None) -> jax.Array:
    """``llmjax.kernels.adapted_linear.changed`` by the library; rows that are not looked at stay as they are. A place
    that does not exist is an error."""
    call = jax.ffi.ffi_call(
        "llmjax_adapted", jax.ShapeDtypeStruct(product.shape, jnp.float32), input_output_aliases={0: 0}
    )
    out: jax.Array = call(
        product,
        x,
        places.of.astype(jnp.int32),
        places.special.astype(jnp.int32),
        matrices.rows_in_use(used),
        delta.a,
        delta.b,
        delta.vectors,
    )
    return out
