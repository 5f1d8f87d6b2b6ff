"""Parameters that know the logical names of their axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def parameters_of(module: nnx.Module) -> dict[str, nnx.Variable]:
    """The parameters of a module, by the names of their paths."""
    return {".".join(map(str, path)): parameter for path, parameter in nnx.to_flat_state(nnx.state(module))}


def state_of(
    params: Mapping[str, Any], *, names: Sequence[str], axes: Sequence[Sequence[str | None]]
) -> nnx.State[Any, Any]:
    """The state of a module with the parameters ``names``.

    Args:
        params: one value for each of the names.
        axes: the logical names of the axes of each.

    Raises:
        ValueError: a name is missing or unknown.
    """
    # NNX assigns leaves by order, so that a wrong name would be a wrong weight.
    if wrong := params.keys() ^ set(names):
        raise ValueError(f"parameters that are missing or unknown: {', '.join(sorted(wrong))}")
    flat = {}
    for name, of_axes in zip(names, axes, strict=True):
        path = tuple(int(part) if part.isdigit() else part for part in name.split("."))
        flat[path] = named(params[name], of_axes)
    return nnx.from_flat_state(flat)
