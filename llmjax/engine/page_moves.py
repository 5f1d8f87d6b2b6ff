"""Pages between the device and the host: small programs beside the step, some pages at once, of one group of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from llmjax.engine.host_pages import PageContent
from llmjax.engine.program_cache import ProgramSpec
from llmjax.engine.programs import StepCompiler
from llmjax.models.layers.state import LayerStack

PAGES = (16, 4, 1)  # that one program moves; together they move any number


@dataclass(frozen=True)
class PendingPages:
    """Pages that the device is reading out, in order."""

    parts: list[tuple[jax.Array, ...]]  # of some pages each: of each array [pages, layers, …]

    def contents(self) -> list[PageContent]:
        """Waits for the device. Each page has memory of its own, so that it can be given back alone."""
        found: list[PageContent] = []
        for part in self.parts:
            arrays = [np.asarray(array) for array in part]
            found += [tuple(array[page].copy() for array in arrays) for page in range(len(arrays[0]))]
        return found


class PageMover:
    """Reads and writes pages of the state.

    Args:
        compiler: knows the state, and which layers a group has.
    """

    def __init__(self, compiler: StepCompiler) -> None:
        self._compiler = compiler
        self._stacks = [stacks_of(compiler, group) for group in range(len(compiler.kv_plan.groups))]
        self._programs: dict[tuple[int, bool, int], Callable[..., Any]] = {}

    def compiled(self) -> PageMover:
        """This one, when every program is compiled."""
        for group in range(len(self._stacks)):
            for count in PAGES:
                self._program(group, count, write=False)
                self._program(group, count, write=True)
        return self

    def read(self, kv: Sequence[LayerStack], group: int, pages: Sequence[int]) -> PendingPages:
        """Starts to read what pages of a group hold when all that was dispatched before has run."""
        parts = []
        for some in _portions(pages):
            part = self._program(group, len(some), write=False)(self._arrays(kv, group), np.array(some, np.int32))
            for array in part:
                array.copy_to_host_async()
            parts.append(part)
        return PendingPages(parts)

    def write(
        self, kv: Sequence[LayerStack], group: int, pages: Sequence[int], contents: Sequence[PageContent]
    ) -> tuple[LayerStack, ...]:
        """What layers keep with other content in some pages of a group; ``kv`` is donated."""
        stacks, at = list(kv), 0
        for some in _portions(pages):
            content = contents[at : at + len(some)]
            values = tuple(np.stack(parts) for parts in zip(*content, strict=True))
            write = self._program(group, len(some), write=True)
            arrays = list(write(self._arrays(stacks, group), np.array(some, np.int32), values))
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
        stacks = [compiler.state_shapes.kv[number] for number in self._stacks[group]]
        arrays = tuple(array for stack in stacks for array in stack.arrays)
        layers = tuple(len(stack.layers) for stack in stacks for _ in stack.arrays)
        moved = tuple(_moved(array, count, layers=own) for array, own in zip(arrays, layers, strict=True))
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


def stacks_of(compiler: StepCompiler, group: int) -> list[int]:
    """Which stacks of the state hold the layers of a group."""
    states, span = compiler.model.graph.config.states, compiler.kv_plan.groups[group].span
    found = []
    for number, stack in enumerate(compiler.state_shapes.kv):
        state = states[stack.layers[0]]
        if state is not None and state.span == span:
            found.append(number)
    return found


def page_shapes(compiler: StepCompiler, group: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of a page's content."""
    stacks = [compiler.state_shapes.kv[number] for number in stacks_of(compiler, group)]
    return tuple(
        jax.ShapeDtypeStruct((len(stack.layers), *array.shape[1:]), array.dtype)
        for stack in stacks
        for array in stack.arrays
    )


def take_pages(arrays: tuple[jax.Array, ...], page: jax.Array, *, layers: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """What pages hold.

    Args:
        arrays: each of some layers' pages, one layer after another [layers * pages, …].
        page: i32 [B], which, in each layer.
        layers: of each array.

    Returns:
        Of each array [B, layers, …].
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
    """The content of so many pages; devices have the same parts of it as of the array."""
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jax.ShapeDtypeStruct((count, layers, *array.shape[1:]), array.dtype, sharding=sharding)


def _spec_of(array: jax.ShapeDtypeStruct) -> PartitionSpec:
    return array.sharding.spec if isinstance(array.sharding, NamedSharding) else PartitionSpec()


def _portions(pages: Sequence[int]) -> Iterator[Sequence[int]]:
    """In order, as many as a program moves in each."""
    at = 0
    for count in PAGES:
        while len(pages) - at >= count:
            yield pages[at : at + count]
            at += count
