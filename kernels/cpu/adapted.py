"""What adapters change of products, in C++ (``src/adapted.cc``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from llmjax.kernels.adapted import Adapted, Delta, Places
from llmjax.kernels.cpu import matrices
from llmjax.kernels.cpu.library import library


def refuses(product: jax.Array, x: jax.Array, delta: Delta, *_: Any) -> str | None:
    """Why the library does not take these types; None: it does."""
    return "not built" if library() is None else refuses_type(delta)


def refuses_type(delta: Delta) -> str | None:
    """Why the library does not take the type of adapters; None: it does."""
    return None if delta.a.dtype in (jnp.float32, jnp.bfloat16, jnp.float16) else f"adapters are {delta.a.dtype}"


def buffers(weights: Sequence[Adapted]) -> list[jax.Array]:
    """The arguments of a call that hold the places of its rows and what adapters change of each weight; none without
    weights. With stacks of experts, an expert's part of an adapter is as an adapter of its own."""
    if not weights:
        return []
    found = [weights[0].places.of.astype(jnp.int32), weights[0].places.special.astype(jnp.int32)]
    for weight in weights:
        assert weight.delta is not None
        delta = weight.delta.here(weight.places)
        vectors = jnp.zeros(0, jnp.float32) if delta.vectors is None else delta.vectors
        found += [delta.a.reshape(-1, delta.a.shape[-1]), delta.b.reshape(-1, delta.b.shape[-1]), vectors]
    return found


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
