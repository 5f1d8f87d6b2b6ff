"""Parameters that know the logical names of their axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def parameter(shape: Sequence[int], dtype: Any, *, axes: Sequence[str | None], plain: bool = False) -> nnx.Param:
    """Declares a parameter, without a value.

    Args:
        axes: a field of ``llmjax.kernels.sharding.ShardingRules`` for each dimension; None: never divided.
        plain: the parameter must be an array, dequantized when it is loaded, because the module does more than multiply
            with it.
    """
    assert len(axes) == len(shape)
    declared = jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
    return nnx.Param(declared, axes=tuple(axes), plain=True) if plain else named(declared, axes)


def named(value: Any, axes: Sequence[str | None]) -> nnx.Param:
    """A parameter with a value."""
    return nnx.Param(value, axes=tuple(axes))


def axes_of(parameter: nnx.Variable) -> tuple[str | None, ...]:
    """The names of axes that a parameter was declared with."""
    names: tuple[str | None, ...] = parameter.get_metadata()["axes"]
    return names


def is_plain(parameter: nnx.Variable) -> bool:
    """Whether a parameter was declared as ``plain``."""
    return bool(parameter.get_metadata().get("plain"))
