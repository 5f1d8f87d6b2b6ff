"""Logits of which every device has some columns: each device takes some of the rows, whole, so that what is done with a
row's logits is done once and needs no other device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from llmjax.kernels.argmax import argmax
from llmjax.kernels.sharding import mesh_axis, own_number, own_part, parts

Arguments = TypeVar("Arguments")
Found = TypeVar("Found")


def on_whole_rows(
    run: Callable[[jax.Array, Arguments], Found], logits: jax.Array, arguments: Arguments, *, vocab_size: int
) -> Found:
    """``run(logits, arguments)``, row by row.

    Args:
        run: a function of logits [n, V] and arrays [n, ...]; gives arrays [n, ...].
        logits: float [R, V]; where the vocabulary is divided, this device's columns, those past the last being zeros.
        arguments: a tree of arrays [R, ...].
        vocab_size: V.
    """
    count, rows = parts("vocab"), logits.shape[0]
    if count == 1:
        return run(logits, arguments)
    axis, missing = mesh_axis("vocab"), -rows % count

    def filled(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1)))

    whole = lax.all_to_all(filled(logits), axis, split_axis=0, concat_axis=1, tiled=True)[:, :vocab_size]
    result = run(whole, jax.tree.map(lambda x: own_part(filled(x), "vocab"), arguments))
    gathered: Found = jax.tree.map(lambda x: lax.all_gather(x, axis, tiled=True)[:rows], result)
    return gathered


def argmax_of_parts(logits: jax.Array, *, vocab_size: int) -> jax.Array:
    """``argmax`` of logits of which this device has some columns, i32 [R]; arguments as for `on_whole_rows`."""
    width = logits.shape[1]
    first = own_number("vocab") * width
    valid = jnp.where(first + jnp.arange(width) < vocab_size, logits, -jnp.inf)
    best = argmax(valid)
    values = jnp.take_along_axis(valid, best[:, None], axis=1)[:, 0]
    values, tokens = lax.all_gather((values, best + first), mesh_axis("vocab"))  # [devices, R]
    winner = argmax(values.T)  # the first of equals has the lowest ids
    return jnp.take_along_axis(tokens, winner[None], axis=0)[0]
