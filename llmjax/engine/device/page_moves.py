"""Moves pages between the device and the host: small programs outside the step, each for some pages of one group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec

from llmjax.engine.core.tier import PageContent
from llmjax.engine.device.commands import Values
from llmjax.engine.programs.cache import ProgramSpec
from llmjax.engine.programs.compiler import StepCompiler
from llmjax.models.layers.state import LayerStack

PAGES = (16, 4, 1)  # numbers of pages that a program moves; together they move any number
MOST_PAGES = PAGES[0]  # in one command


@dataclass(frozen=True)
class PendingPages:
    """Pages that the device is reading out, in order."""

    count: int
    parts: list[tuple[jax.Array, ...]]  # arrays of some pages each: [pages, layers, …]
    others: list[Future[list[Values]]] = field(default_factory=list)  # parts that other ranks have, likewise

    def arrays(self) -> list[npt.NDArray[Any]]:
        """This rank's part of the pages, for each stack of layers [pages, layers, …]. Waits for the device."""
        return [np.concatenate([_own_part(array) for array in some]) for some in zip(*self.parts, strict=True)]

    def contents(self) -> list[PageContent]:
        """The content of each page; waits for the devices. Each has its own memory, so that it can be freed alone."""
        arrays = self.arrays()
        for other in self.others:
            arrays += other.result()
        return [tuple(array[page].copy() for array in arrays) for page in range(self.count)]


@dataclass(frozen=True)
class ReadInTurn:
    """Any number of pages that are being read out, in order."""

    parts: list[PendingPages]

    def contents(self) -> list[PageContent]:
        """The content of every page, in order. Waits for the devices."""
        return [content for part in self.parts for content in part.contents()]


class PageMover:
    """Reads and writes pages of the state.

    Args:
        compiler: knows the state, and which layers a group has.
    """

    def __init__(self, compiler: StepCompiler) -> None:
        self._compiler = compiler
        self._stacks = [stacks_of(compiler, group) for group in range(len(compiler.kv_plan.groups))]
        self._programs: dict[tuple[int, bool, int], Callable[..., Any]] = {}

    def arrays_of(self, group: int) -> int:
        """How many of a group's arrays this process has, or has a part of."""
        return len(self._shapes(group)[0])

    def compiled(self) -> PageMover:
        """Returns this object when every program is compiled."""
        for group in range(len(self._stacks)):
            for count in PAGES if self._stacks[group] else ():
                self._program(group, count, write=False)
                self._program(group, count, write=True)
        return self

    def read(self, kv: Sequence[LayerStack], group: int, pages: Sequence[int]) -> PendingPages:
        """Starts to read pages of a group, with the content after all earlier dispatches have run."""
        parts: list[tuple[jax.Array, ...]] = []
        for some in _portions(pages) if self._stacks[group] else ():
            part = self._program(group, len(some), write=False)(self._arrays(kv, group), np.array(some, np.int32))
            for array in part:
                array.copy_to_host_async()
            parts.append(part)
        return PendingPages(len(pages), parts)

    def write(
        self, kv: Sequence[LayerStack], group: int, pages: Sequence[int], values: Sequence[npt.NDArray[Any]]
    ) -> tuple[LayerStack, ...]:
        """The stacks with other content in some pages of a group; ``kv`` is donated.

        Args:
            values: this process's part of the content: of each array [pages, layers, …].
        """
        stacks, at = list(kv), 0
        for some in _portions(pages) if self._stacks[group] else ():
            write, shapes = self._program(group, len(some), write=True), self._moved(group, len(some))
            content = tuple(
                _everywhere(array[at : at + len(some)], shape) for array, shape in zip(values, shapes, strict=True)
            )
            arrays = list(write(self._arrays(stacks, group), np.array(some, np.int32), content))
            for number in self._stacks[group]:
                own = len(stacks[number].arrays)
                stacks[number] = stacks[number].with_arrays(arrays[:own])
                del arrays[:own]
            at += len(some)
        return tuple(stacks)

    def _arrays(self, kv: Sequence[LayerStack], group: int) -> tuple[jax.Array, ...]:
        return tuple(array for number in self._stacks[group] for array in kv[number].arrays)

    def _program(self, group: int, count: int, *, write: bool) -> Callable[..., Any]:
        name = (group, write, count)
        if name not in self._programs:
            self._programs[name] = self._compiler.cache.get(self._spec(group, count, write=write))
        return self._programs[name]

    def _spec(self, group: int, count: int, *, write: bool) -> ProgramSpec:
        compiler = self._compiler
        arrays, layers = self._shapes(group)
        moved = self._moved(group, count)
        pages = jax.ShapeDtypeStruct((count,), jnp.int32, sharding=compiler.platform.everywhere)
        return ProgramSpec(
            function=put_pages if write else take_pages,
            arguments=(arrays, pages, moved) if write else (arrays, pages),
            device=compiler.platform.device,
            static={"layers": layers},
            donated=(0,) if write else (),
            sharding=compiler.platform.sharding,
            results=tuple(_spec_of(array) for array in (arrays if write else moved)),
        )

    def _shapes(self, group: int) -> tuple[tuple[jax.ShapeDtypeStruct, ...], tuple[int, ...]]:
        """Shapes of a group's arrays, and how many layers each has."""
        stacks = [self._compiler.state_shapes.kv[number] for number in self._stacks[group]]
        arrays = tuple(array for stack in stacks for array in stack.arrays)
        return arrays, tuple(len(stack.layers) for stack in stacks for _ in stack.arrays)

    def _moved(self, group: int, count: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the content of this many pages."""
        return tuple(_moved(array, count, layers=layers) for array, layers in zip(*self._shapes(group), strict=True))


def stacks_of(compiler: StepCompiler, group: int) -> list[int]:
    """Numbers of the stacks of the state that hold the layers of a group."""
    states, span = compiler.model.graph.config.states, compiler.kv_plan.groups[group].span
    numbers = []
    for number, stack in enumerate(compiler.state_shapes.kv):
        state = states[stack.layers[0]]
        if state is not None and state.span == span:
            numbers.append(number)
    return numbers


def page_shapes(compiler: StepCompiler, group: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of this rank's part of a page."""
    stacks = [compiler.state_shapes.kv[number] for number in stacks_of(compiler, group)]
    return tuple(
        jax.ShapeDtypeStruct((len(stack.layers), *_own_shape(array)[1:]), array.dtype)
        for stack in stacks
        for array in stack.arrays
    )


def take_pages(arrays: tuple[jax.Array, ...], page: jax.Array, *, layers: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """The content of some pages.

    Args:
        arrays: each has the pages of some layers, one layer after another: [layers * pages, …].
        page: i32 [B], numbers of the pages, the same in each layer.
        layers: number of layers in each array.

    Returns:
        The content from each array: [B, layers, …].
    """
    return tuple(array[_places(array, page, own)] for array, own in zip(arrays, layers, strict=True))


def put_pages(
    arrays: tuple[jax.Array, ...], page: jax.Array, content: tuple[jax.Array, ...], *, layers: tuple[int, ...]
) -> tuple[jax.Array, ...]:
    """The arrays with other content in some pages; arguments and shapes as `take_pages` has and returns them."""
    put = zip(arrays, content, layers, strict=True)
    return tuple(array.at[_places(array, page, own)].set(values) for array, values, own in put)


def _places(array: jax.Array, page: jax.Array, layers: int) -> jax.Array:
    """i32 [B, layers]."""
    return page[:, None] + jnp.arange(layers, dtype=jnp.int32) * (len(array) // layers)


def _moved(array: jax.ShapeDtypeStruct, count: int, *, layers: int) -> jax.ShapeDtypeStruct:
    """The shape of the content of ``count`` pages, which is divided among devices as the array is."""
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jax.ShapeDtypeStruct((count, layers, *array.shape[1:]), array.dtype, sharding=sharding)


def _own_shape(array: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Shape of what this process's devices have of an array together."""
    sharding, axis = array.sharding, divided_axis(array)
    if axis is None:
        return tuple(array.shape)
    own = list(sharding.shard_shape(array.shape))
    own[axis] *= len(sharding.addressable_devices)
    return tuple(own)


def _own_part(array: jax.Array) -> npt.NDArray[Any]:
    """The part of an array that this process's devices have, on the host."""
    if array.is_fully_addressable:
        return np.asarray(array)
    axis = divided_axis(array)
    if axis is None:
        return np.asarray(array.addressable_shards[0].data)
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[axis].start)
    return np.concatenate([np.asarray(shard.data) for shard in shards], axis)


def _everywhere(own: npt.NDArray[Any], shape: jax.ShapeDtypeStruct) -> npt.NDArray[Any] | jax.Array:
    """The array of which this process has a part, as programs take it."""
    sharding = shape.sharding
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_addressable:
        return own
    return jax.make_array_from_process_local_data(sharding, own, shape.shape)


def divided_axis(array: jax.Array | jax.ShapeDtypeStruct) -> int | None:
    """The axis along which devices of several processes divide an array; None: there are none, or each has all."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_addressable:
        return None
    return next((axis for axis, name in enumerate(sharding.spec) if name is not None), None)


def _spec_of(array: jax.ShapeDtypeStruct) -> PartitionSpec:
    return array.sharding.spec if isinstance(array.sharding, NamedSharding) else PartitionSpec()


def _portions(pages: Sequence[int]) -> Iterator[Sequence[int]]:
    """In order, as many as a program moves in each."""
    at = 0
    for count in PAGES:
        while len(pages) - at >= count:
            yield pages[at : at + count]
            at += count
