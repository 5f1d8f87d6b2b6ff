"""Parameters with the logical names of their axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.sharding import WHOLE, Axes, parts


def parameter(shape: Sequence[int], dtype: Any, *, axes: Sequence[str | None]) -> nnx.Param:
    """A parameter that is only declared.

    Args:
        axes: one for each dimension, a field of ``llmjax.kernels.sharding.ShardingRules``; None: never divided.
    """
    assert len(axes) == len(shape)
    return named(jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)), axes)


def named(value: Any, axes: Sequence[str | None]) -> nnx.Param:
    """A parameter with a value."""
    return nnx.Param(value, axes=tuple(axes))


def axes_of(parameter: nnx.Variable) -> tuple[str | None, ...]:
    """The names that a parameter was declared with."""
    names: tuple[str | None, ...] = parameter.get_metadata()["axes"]
    return names


def tree_of_axes(module: Any) -> Any:
    """The module with an Axes in place of each parameter.

    Raises:
        NotImplementedError: a weight that is not an array is divided.
    """

    def of(parameter: nnx.Variable) -> Axes:
        names, value = axes_of(parameter), parameter.get_value()
        if all(parts(name) == 1 for name in names if name is not None):
            return WHOLE
        if not hasattr(value, "ndim"):
            raise NotImplementedError(f"{type(value).__name__} weights cannot be divided over devices")
        return Axes(names)

    return jax.tree.map(of, module, is_leaf=lambda x: isinstance(x, nnx.Variable))
