"""The arrays of adapters on the devices, and the values that an adapter has in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec

from llmjax.adapters.adapter import Adapter, LowRank
from llmjax.engine.adapters.layout import EMBEDDING, HEAD, AdaptedParameter, AdapterLayout, Use, put_adapter
from llmjax.engine.programs.cache import Executable, ProgramCache, ProgramSpec
from llmjax.kernels.sharding import on_devices
from llmjax.models import ModelGraph
from llmjax.parallel.division import Cut, Division
from llmjax.parallel.shards import cut_array
from llmjax.platforms import Platform

ABSORBED = ".kv_b_proj.weight"  # of latent attention: it is used in halves, see ``kernels/absorbed.py``
Values = list[npt.NDArray[Any]]


@dataclass(frozen=True)
class _Axis:
    """The axis of an array that devices divide."""

    cut: Cut
    axis: int

    def whole(self, size: int) -> int:
        """The size of the axis on all devices together, which may be filled up."""
        return int(self.cut.entries.size)

    def spread(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The parts of all devices, one after another."""
        own = replace(self.cut, axis=self.axis)
        return np.concatenate([cut_array(values, own, i) for i in range(len(self.cut.entries))], self.axis)


@dataclass(frozen=True)
class _Array:
    """An array of which each device has all, or a part."""

    shape: tuple[int, ...]
    dtype: Any
    divided: _Axis | None = None

    def placed(self, platform: Platform) -> jax.ShapeDtypeStruct:
        """Its shape on all devices together, and where it lies."""
        sharding, shape = platform.sharding, list(self.shape)
        if sharding is None or self.divided is None:
            return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=platform.everywhere)
        axis = self.divided.axis
        shape[axis] = self.divided.whole(shape[axis])
        spec = PartitionSpec(*[None] * axis, *sharding.mesh.axis_names)
        return jax.ShapeDtypeStruct(tuple(shape), self.dtype, sharding=NamedSharding(sharding.mesh, spec))


@dataclass(frozen=True)
class AdaptedShape:
    """A parameter that adapters may change, with its shape and how devices divide it.

    Attributes:
        shape: the shape of the whole parameter, [out, in] or [experts, out, in].
    """

    parameter: AdaptedParameter
    shape: tuple[int, ...]
    cut: Cut | None

    def _along(self, axis: int, own: int) -> _Axis | None:
        """The division of an array's axis ``own`` that is the weight's ``axis``."""
        return None if self.cut is None or self.cut.axis != axis else _Axis(self.cut, own)

    def arrays(self, layout: AdapterLayout, dtype: jnp.dtype) -> list[_Array]:
        """The arrays of all places."""
        places, rank, f32 = layout.places, layout.rank, jnp.float32
        if self.parameter.use is Use.EXPERTS:
            count, size_out, size_in = self.shape
            experts = self._along(0, 1)
            return [
                _Array((places, count, rank, size_in), dtype, experts or self._along(2, 3)),
                _Array((places, count, rank, size_out), dtype, experts or self._along(1, 3)),
            ]
        size_out, size_in = self.shape
        if self.parameter.use is Use.ROWS:
            return [
                _Array((size_out, places * rank), dtype, self._along(0, 0)),
                _Array((places * rank, size_in), dtype),
            ]
        of_rows = self._along(0, 1)
        return [
            _Array((places * rank, size_in), dtype, self._along(1, 1)),
            _Array((places * rank, size_out), dtype, of_rows),
            _Array((2 * places, size_out), f32, of_rows),
        ]

    def values(self, rank: int) -> list[_Array]:
        """The values of one place, see `put_adapter`."""
        f32 = jnp.float32
        if self.parameter.use is Use.EXPERTS:
            count, size_out, size_in = self.shape
            experts = self._along(0, 0)
            return [
                _Array((count, rank, size_in), f32, experts or self._along(2, 2)),
                _Array((count, rank, size_out), f32, experts or self._along(1, 2)),
            ]
        size_out, size_in = self.shape
        if self.parameter.use is Use.ROWS:
            return [_Array((size_out, rank), f32, self._along(0, 0)), _Array((rank, size_in), f32)]
        of_rows = self._along(0, 1)
        return [
            _Array((rank, size_in), f32, self._along(1, 1)),
            _Array((rank, size_out), f32, of_rows),
            _Array((2, size_out), f32, of_rows),
        ]

    def parts(self, part: LowRank | None, rank: int) -> Iterator[npt.NDArray[np.float32]]:
        """An adapter's values, filled up with zeros; None: it does not change this parameter."""
        for array, own in zip(self.values(rank), self._given(part), strict=True):
            whole = np.zeros(array.shape, np.float32)
            if own is not None:
                whole[tuple(map(slice, own.shape))] = own
            yield whole if array.divided is None else array.divided.spread(whole)

    def _given(self, part: LowRank | None) -> list[npt.NDArray[np.float32] | None]:
        if part is None:
            return [None] * self.parameter.use.arrays
        match self.parameter.use:
            case Use.EXPERTS:
                return [part.a, part.b.swapaxes(1, 2)]
            case Use.ROWS:  # its rows are what products would take as inputs
                return [part.a.T, part.b.T]
        if part.bias is None and part.gain is None:
            return [part.a, part.b.T, None]
        zeros = np.zeros(self.shape[0], np.float32)
        bias, gain = part.bias, part.gain
        vectors = np.stack([zeros if bias is None else bias, zeros if gain is None else gain - 1])
        return [part.a, part.b.T, vectors]


class AdapterStacks:
    """The devices' places for adapters, all empty when they have been made.

    Args:
        shapes: the parameters that adapters may change, those of this stage.
        whole: those of all stages, by their names in the whole model.
        stored: the name in the whole model of a parameter of this stage.
        places, rank: see `AdapterLayout`.
        dtype: type of the matrices that rows are multiplied with first.

    Attributes:
        layout: the layout of the arrays.
        arrays: on the devices; replaced by `put`. There are none before `make`, and none after `free`.
    """

    def __init__(
        self,
        shapes: Sequence[AdaptedShape],
        *,
        whole: Mapping[str, AdaptedShape],
        stored: Callable[[str], str],
        places: int,
        rank: int,
        dtype: jnp.dtype,
        platform: Platform,
    ) -> None:
        self.layout = AdapterLayout(places, rank, tuple(one.parameter for one in shapes))
        self.shapes = shapes
        self._whole = whole
        self._own_values = [0, *_numbers_of([stored(one.parameter.name) for one in shapes], whole)]
        self._platform = platform
        special = _Array((places + 1,), jnp.int32)
        arrays = [special, *(array for one in shapes for array in one.arrays(self.layout, dtype))]
        self._placed = tuple(array.placed(platform) for array in arrays)
        self.arrays: tuple[jax.Array, ...] = ()

    @classmethod
    def of(
        cls,
        graph: ModelGraph,
        shapes: Mapping[str, jax.ShapeDtypeStruct],
        *,
        places: int,
        rank: int,
        division: Division,
        platform: Platform,
        whole: Mapping[str, AdaptedShape] | None = None,
        stored: Callable[[str], str] = str,
    ) -> AdapterStacks:
        """The places for adapters of a model, or of a stage of one.

        Args:
            graph, shapes: what all devices have together, as ``abstract_model`` declares it.
            whole, stored: as for the class; None: there is one stage.
        """
        own = adapted_shapes(graph, shapes, division)
        return cls(
            list(own.values()),
            whole=own if whole is None else whole,
            stored=stored,
            places=places,
            rank=rank,
            dtype=graph.dtype,
            platform=platform,
        )

    def make(self) -> None:
        """Makes the places, with nothing in them; does nothing where they are there."""
        if not self.arrays:
            self.arrays = tuple(jnp.zeros(one.shape, one.dtype, device=one.sharding) for one in self._placed)

    def free(self) -> None:
        """Frees the devices' memory of the places and of what is in them."""
        for array in self.arrays:
            array.delete()
        self.arrays = ()

    @property
    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters that adapters may change, of all stages, by name."""
        return {name: one.shape for name, one in self._whole.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def needed_bytes(self) -> int:
        """Bytes that the arrays of all devices take together once they have been made."""
        sizes = [
            prod(one.shape if one.sharding is None else one.sharding.shard_shape(one.shape)) for one in self._placed
        ]
        return len(self._platform.devices) * sum(
            size * one.dtype.itemsize for size, one in zip(sizes, self._placed, strict=True)
        )

    @property
    def specs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the arrays, and where they lie."""
        return self._placed

    def values_of(self, adapter: Adapter) -> Values:
        """An adapter's values, for `put` at every stage: all devices' parts, one after another.

        Args:
            adapter: one whose parts this model has, of a rank up to the layout's.
        """
        is_special = any(part.gain is not None or part.bias is not None for part in adapter.parts.values())
        values: Values = [np.array(is_special, np.int32)]
        for name, one in self._whole.items():
            values += one.parts(adapter.parts.get(name), self.layout.rank)
        return values

    def put(self, program: Executable, place: int, values: Values) -> None:
        """Writes an adapter to a place: this stage's share of it.

        Args:
            program: what `put_spec` specifies.
            values: those of `values_of`.
        """
        own = [values[number] for number in self._own_values]
        given = tuple(on_devices(value, like.sharding) for value, like in zip(own, self._values, strict=True))
        self.arrays = program(self.arrays, given, np.array(place, np.int32))

    def compiled(self, cache: ProgramCache) -> Executable:
        """The program that `put` takes."""
        return cache.get(self.put_spec)

    @cached_property
    def put_spec(self) -> ProgramSpec:
        """The specification of the program that writes an adapter."""
        platform = self._platform
        place = jax.ShapeDtypeStruct((), jnp.int32, sharding=platform.everywhere)
        return ProgramSpec(
            function=put_adapter,
            arguments=(self._placed, self._values, place),
            device=platform.device,
            static={"layout": self.layout},
            donated=(0,),
            sharding=platform.sharding,
            results=tuple(_spec_of(one) for one in self._placed),
        )

    @cached_property
    def _values(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        flag = _Array((), jnp.int32)
        every = [flag, *(array for one in self.shapes for array in one.values(self.layout.rank))]
        return tuple(array.placed(self._platform) for array in every)


def _numbers_of(names: Sequence[str], whole: Mapping[str, AdaptedShape]) -> Iterator[int]:
    """Where the values of parameters are among those of all, which follow whether an adapter is special."""
    starts, at = {}, 1
    for name, one in whole.items():
        starts[name], at = at, at + one.parameter.use.arrays
    for name in names:
        yield from range(starts[name], starts[name] + whole[name].parameter.use.arrays)


def adapted_shapes(
    graph: ModelGraph, shapes: Mapping[str, jax.ShapeDtypeStruct], division: Division
) -> dict[str, AdaptedShape]:
    """The parameters that adapters may change, by name.

    Args:
        graph, shapes: what all devices have together, as ``abstract_model`` declares it.
    """
    axes = dict(zip(graph.names, graph.axes, strict=True))
    found = {}
    for name, shape in adaptable_shapes(graph, shapes).items():
        owner = name if name in axes else EMBEDDING  # of a tied head
        use = Use.PRODUCT if name == HEAD else use_of(name, len(shape), graph)
        assert use is not None
        cut = division.cut(owner, axes[owner], shape)
        summed = axes[owner][1] if use is Use.PRODUCT and cut is not None and cut.axis == 1 else None
        found[name] = AdaptedShape(AdaptedParameter(name, use, summed), shape, cut)
    return found


def adaptable_shapes(graph: ModelGraph, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that adapters may change, by name, among them that of a tied head.

    Args:
        graph, shapes: the whole model, as ``abstract_model`` declares it.
    """
    names = (name for name in graph.names if use_of(name, len(shapes[name].shape), graph) is not None)
    found = {name: tuple(shapes[name].shape) for name in names}
    config = graph.config
    if config.tie_word_embeddings and config.has_head and config.pooler is None:
        found[HEAD] = tuple(shapes[EMBEDDING].shape)
    return found


def use_of(name: str, dimensions: int, graph: ModelGraph) -> Use | None:
    """What a model does with a parameter that adapters may change; None: they may not."""
    if name == EMBEDDING:
        return Use.ROWS if graph.config.embeds else None  # the last stage has it as its head
    if name == HEAD or (name.startswith("head.") and name.endswith(".dense.weight")):
        return Use.PRODUCT
    if name.endswith(ABSORBED):
        return Use.PRODUCT
    if not name.startswith("model.layers.") or not name.endswith(".weight") or name in graph.plain:
        return None
    return {2: Use.PRODUCT, 3: Use.EXPERTS}.get(dimensions)


def _spec_of(array: jax.ShapeDtypeStruct) -> PartitionSpec:
    return array.sharding.spec if isinstance(array.sharding, NamedSharding) else PartitionSpec()
