"""Programs for several devices: which axis of which array is divided, and where devices add up.

Models name the axes of their arrays by what they are ("heads", "inner"); a table says along which axis of the mesh each
is divided. A program is then one for each device (``jax.shard_map``): it sees its own part of every array and so runs
the same kernels as on one device, and asks here for the few things that need the others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llmjax.kernels.cpu.shared_sum import shared_sum

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Axes:
    """The logical axes of an array, first dimension first; of a tree of arrays where all have the same.

    Attributes:
        names: fields of ShardingRules; None, or fewer names than dimensions: not divided.
    """

    names: tuple[str | None, ...] = ()


WHOLE = Axes()  # the same on all devices


@dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """The axis of the mesh along which each logical axis is divided; None: every device has all of it."""

    vocab: str | None = "tensor"
    hidden: str | None = None
    heads: str | None = "tensor"
    kv_heads: str | None = "tensor"
    channels: str | None = "tensor"  # of a convolution, which are those of a device's heads
    parts: str | None = "tensor"  # of a product that a state space begins with, which are those of a device's heads
    inner: str | None = "tensor"
    experts: str | None = "tensor"  # where devices have whole ones; else each has a part of all, along "inner"


@dataclass(frozen=True)
class Sharding:
    """A mesh of devices and how arrays lie on it.

    Attributes:
        in_memory: processes of one machine, whose CPUs the devices are, add up in memory that they share.
    """

    mesh: Mesh
    rules: ShardingRules = ShardingRules()
    in_memory: bool = False

    def spec(self, axes: Axes) -> PartitionSpec:
        """The same axes as JAX's ``PartitionSpec``."""
        return PartitionSpec(*(None if name is None else getattr(self.rules, name) for name in axes.names))

    def placed(self, axes: Axes) -> NamedSharding:
        """Where an array with these axes lies."""
        return NamedSharding(self.mesh, self.spec(axes))

    def parts(self, name: str) -> int:
        """How many parts a logical axis is divided into."""
        axis = getattr(self.rules, name)
        return 1 if axis is None else int(self.mesh.shape[axis])

    def program(self, run: Callable[..., Any], *, arguments: Any, results: Any) -> Callable[..., Any]:
        """``run`` on every device, with its part of the arguments.

        Args:
            arguments, results: prefixes of their trees, with PartitionSpecs as leaves.
        """

        def on_one(*given: Any) -> Any:
            with sharded(self):
                return run(*given)

        # Pallas and FFI calls do not say over which axes their results vary, so that it cannot be checked.
        mapped: Callable[..., Any] = jax.shard_map(
            on_one, mesh=self.mesh, in_specs=arguments, out_specs=results, check_vma=False
        )
        return mapped


def on_devices(values: np.ndarray, place: jax.sharding.Sharding | jax.Device) -> jax.Array:
    """An array on devices, of which other processes, that have the same values, may have some."""
    if isinstance(place, jax.Device) or place.is_fully_addressable:
        return jax.device_put(values, place)
    # device_put would have the processes send each other the values, to compare them.
    return jax.make_array_from_callback(values.shape, place, lambda index: values[index])


# Functions that are traced within it are traced again outside of it.
_active = jax.make_user_context(default_value=None)


def sharded(sharding: Sharding | None) -> AbstractContextManager[Any]:
    """A block within which a program is traced that is one device's of several; None: that of one device."""
    context: AbstractContextManager[Any] = _active(sharding)
    return context


def devices() -> int:
    """Devices that run the program which is being traced."""
    sharding: Sharding | None = _active.value
    return 1 if sharding is None else int(sharding.mesh.size)


def parts(name: str) -> int:
    """How many parts a logical axis is divided into here."""
    sharding: Sharding | None = _active.value
    return 1 if sharding is None else sharding.parts(name)


def mesh_axis(name: str) -> str:
    """The axis of the mesh, for JAX's collectives, of a logical axis that is divided here."""
    axis: str = getattr(_active.value.rules, name)
    return axis


def all_sum(partial: Tree, name: str) -> Tree:
    """The sum over the devices among which a logical axis is divided, of arrays that each of them has its own of. A
    second one along the same axis needs the result of the first, or what that led to."""
    if parts(name) == 1:
        return partial
    sharding: Sharding = _active.value
    if not sharding.in_memory or any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(partial)):
        return jax.lax.psum(partial, mesh_axis(name))
    place = [field.name for field in fields(ShardingRules)].index(name)
    leaves, tree = jax.tree.flatten(partial)
    (leaf,) = leaves
    sums: Tree = jax.tree.unflatten(tree, [shared_sum(leaf, own_number(name), place=place)])
    return sums


def own_number(name: str) -> jax.Array | int:
    """Which part of a logical axis this device has, i32 []."""
    return 0 if parts(name) == 1 else jax.lax.axis_index(mesh_axis(name))


def own_range(name: str, size: int) -> tuple[jax.Array | int, jax.Array | int]:
    """The entries of a logical axis that this device has, of ``size`` that are spread evenly: the first of them, and
    the first of the next device."""
    number, count = own_number(name), parts(name)
    return number * size // count, (number + 1) * size // count


def own_part(x: jax.Array, name: str) -> jax.Array:
    """This device's part of an array that all devices have all of, whose first axis is the logical axis ``name``."""
    if parts(name) == 1:
        return x
    size = len(x) // parts(name)
    return jax.lax.dynamic_slice_in_dim(x, own_number(name) * size, size)
