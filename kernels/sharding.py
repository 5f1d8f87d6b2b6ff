"""Operations over several devices: which axis of which array is divided, and kernels that see their own part alone.

Models name the axes of their arrays by what they are ("heads", "inner"); a table says along which axis of the mesh each
is divided. Within `sharded`, an `Operation` that knows the axes of its arguments runs under ``jax.shard_map``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclass(frozen=True)
class Axes:
    """The logical axes of an array, first dimension first; of a tree of arrays where all have the same.

    Attributes:
        names: fields of ShardingRules; None, or fewer names than dimensions: not divided.
        summed: of a result, the axis whose parts each device has summed over; their sum is what is returned.
    """

    names: tuple[str | None, ...] = ()
    summed: str | None = None


WHOLE = Axes()  # the same on all devices


@dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """The axis of the mesh along which each logical axis is divided; None: every device has all of it."""

    vocab: str | None = "tensor"
    hidden: str | None = None
    heads: str | None = "tensor"
    kv_heads: str | None = "tensor"
    inner: str | None = "tensor"
    experts: str | None = None


@dataclass(frozen=True)
class Sharding:
    """A mesh of devices and how arrays lie on it."""

    mesh: Mesh
    rules: ShardingRules = ShardingRules()

    def spec(self, axes: Axes) -> PartitionSpec:
        """As JAX has it."""
        return PartitionSpec(*(None if name is None else getattr(self.rules, name) for name in axes.names))

    def placed(self, axes: Axes) -> NamedSharding:
        """Where an array with these axes lies."""
        return NamedSharding(self.mesh, self.spec(axes))

    def parts(self, name: str) -> int:
        """How many parts a logical axis is divided into."""
        axis = getattr(self.rules, name)
        return 1 if axis is None else int(self.mesh.shape[axis])


@dataclass(frozen=True)
class CallAxes:
    """Of an operation's call: a prefix of the tree of its arguments, and one of its results, with Axes as leaves."""

    arguments: tuple[Any, ...]
    results: Any


# Functions that are traced within them are traced again outside of them.
_active = jax.make_user_context(default_value=None)
_divided = jax.make_user_context(default_value=None)  # on one of its devices


def sharded(sharding: Sharding | None) -> AbstractContextManager[Any]:
    """A block within which operations are traced for several devices; None: for one."""
    context: AbstractContextManager[Any] = _active(sharding)
    return context


def active() -> Sharding | None:
    """What the innermost `sharded` was given."""
    found: Sharding | None = _active.value
    return found


def parts(name: str) -> int:
    """How many parts a logical axis is divided into here."""
    sharding = active()
    return 1 if sharding is None else sharding.parts(name)


def own_part(x: jax.Array, name: str) -> jax.Array:
    """This device's part of an array that all devices have all of: its first axis is the logical axis ``name``.

    For arrays whose parts are not what a device has of an array that is divided, such as one of several behind each
    other. Where nothing is divided, and so outside of an `Operation`, it is all of it.
    """
    sharding: Sharding | None = _divided.value
    if sharding is None or sharding.parts(name) == 1:
        return x
    size = len(x) // sharding.parts(name)
    number = jax.lax.axis_index(getattr(sharding.rules, name))
    return jax.lax.dynamic_slice_in_dim(x, number * size, size)


def on_parts(run: Callable[..., Any], axes: CallAxes, arguments: tuple[Any, ...], sharding: Sharding) -> Any:
    """Calls ``run`` on every device with its part of the arguments, and adds up what results are sums of."""

    def specs(tree: Any) -> Any:
        return jax.tree.map(sharding.spec, tree, is_leaf=_is_axes)

    def whole(axes: Axes, result: Any) -> Any:
        if axes.summed is None or sharding.parts(axes.summed) == 1:
            return result
        return jax.lax.psum(result, getattr(sharding.rules, axes.summed))

    def on_one(*arguments: Any) -> Any:
        with sharded(None), _divided(sharding):
            return jax.tree.map(whole, axes.results, run(*arguments), is_leaf=_is_axes)

    # Pallas and FFI calls do not say over which axes their results vary, so that it cannot be checked.
    mapped = jax.shard_map(
        on_one,
        mesh=sharding.mesh,
        in_specs=specs(axes.arguments),
        out_specs=specs(axes.results),
        check_vma=False,
    )
    return mapped(*arguments)


def _is_axes(x: Any) -> bool:
    return isinstance(x, Axes)
