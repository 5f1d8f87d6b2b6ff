"""Parameters with the logical names of their axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def parameter(shape: Sequence[int], dtype: Any, *, axes: Sequence[str | None], plain: bool = False) -> nnx.Param:
    """A parameter that is only declared.

    Args:
        axes: one for each dimension, a field of ``llmjax.kernels.sharding.ShardingRules``; None: never divided.
        plain: the module does more than multiply with it, so that it is to be an array, dequantized when it is loaded.
    """
    assert len(axes) == len(shape)
    declared = jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
    return nnx.Param(declared, axes=tuple(axes), plain=True) if plain else named(declared, axes)


def named(value: Any, axes: Sequence[str | None]) -> nnx.Param:
    """A parameter with a value."""
    return nnx.Param(value, axes=tuple(axes))


def axes_of(parameter: nnx.Variable) -> tuple[str | None, ...]:
    """The names that a parameter was declared with."""
    names: tuple[str | None, ...] = parameter.get_metadata()["axes"]
    return names


def is_plain(parameter: nnx.Variable) -> bool:
    """Whether it was declared as ``plain``."""
    return bool(parameter.get_metadata().get("plain"))
