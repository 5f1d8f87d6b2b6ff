"""Places weights from files onto devices, one after another, so that memory holds little besides the weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from llmjax.checkpoint.experts import ExpertStack
from llmjax.checkpoint.stored_tensor import StoredTensor
from llmjax.engine.loading.dummy import is_dummy, make_on_device
from llmjax.engine.loading.packed_weights import PackedWeights
from llmjax.errors import ConfigError
from llmjax.kernels.offloading import HOST_MEMORY, SplitStack
from llmjax.kernels.qtensor import QTensor
from llmjax.kernels.sharding import on_devices
from llmjax.parallel.division import Cut
from llmjax.parallel.shards import cut_array, cut_source
from llmjax.platforms import Platform
from llmjax.quantization.plan import Kept
from llmjax.weights.packing import RowSource, RowStack, put

Part = np.ndarray | RowSource | RowStack  # a device's part of a tensor, before it is on the device
TRANSFERS = 2  # weights on their way to the device at a time: the host holds them until they are there


class Placer:
    """Puts weights on one or several devices.

    Args:
        platform: the devices, and how they want quantized matrices.
        activations: what products with quantized matrices round activations to, unless a matrix says.
        offloaded: number of experts of each stack, the last ones, that go to the host's memory, not to the device.
        packed: where packed matrices are kept from start to start.

    Raises:
        ConfigError: the device cannot read the host's memory.
    """

    def __init__(
        self, platform: Platform, *, activations: str, offloaded: int = 0, packed: PackedWeights | None = None
    ) -> None:
        self._platform = platform
        if offloaded and HOST_MEMORY not in {memory.kind for memory in platform.device.addressable_memories()}:
            raise ConfigError(f"num_experts_offload_per_rank: {platform.device} cannot read the host's memory")
        self._activations = activations
        self._offloaded = offloaded
        self._packed = PackedWeights() if packed is None else packed
        self._under_way: deque[jax.Array | QTensor | SplitStack] = deque()
        self.dequantized: list[str] = []  # names of matrices that cannot be cut as they are quantized

    def place(
        self, name: str, tensor: StoredTensor, kept: Kept, shape: jax.ShapeDtypeStruct, *, cut: Cut | None = None
    ) -> jax.Array | QTensor | SplitStack:
        """Reads a tensor and starts its copy to the device; waits for all copies but the last few.

        Args:
            name: name in the model.
            kept: the form in which it is kept.
            shape: shape and dtype that the model wants.
            cut: which part of it each device has; None: all of it.
        """
        weight: jax.Array | QTensor | SplitStack
        if cut is None and not self._offloaded and is_dummy(tensor):
            tile, activations = self._platform.weight_tile, self._activations_of(kept)
            return make_on_device(name, kept, shape, self._platform.everywhere, tile=tile, activations=activations)
        parts = self._parts(name, tensor, kept, np.dtype(shape.dtype), cut)
        if self._offloaded and ".experts." in name and len(shape.shape) == 3:
            here, there = zip(*(_split(part, self._offloaded) for part in parts), strict=True)
            weight = SplitStack(
                self._put(name, here, kept, shape.dtype, cut),
                self._put(f"{name} on the host", there, kept, shape.dtype, cut, memory=HOST_MEMORY),
            )
        else:
            weight = self._put(name, parts, kept, shape.dtype, cut)
        self._under_way.append(weight)
        if len(self._under_way) > TRANSFERS:
            jax.block_until_ready(self._under_way.popleft())
        return weight

    @cached_property
    def _own(self) -> dict[int, jax.Device]:
        """This process's devices, by their numbers among all."""
        devices = self._platform.devices
        return {devices.index(device): device for device in self._platform.own_devices}

    def _parts(self, name: str, tensor: StoredTensor, kept: Kept, dtype: np.dtype, cut: Cut | None) -> Sequence[Part]:
        """The part of a tensor for each of this process's devices; one for all of them if it is not cut."""
        if cut is None:
            return [tensor.read(dtype) if kept.source is None else kept.source]
        if kept.source is not None:
            sources = [cut_source(kept.source, cut, number) for number in self._own]
            whole = [source for source in sources if source is not None]
            if len(whole) == len(sources):
                return whole
            self.dequantized.append(name)
        if isinstance(tensor, ExpertStack) and cut.axis == 0:
            return [tensor.read_some(cut.entries[number], dtype) for number in self._own]
        values = tensor.read(dtype)
        return [cut_array(values, cut, number) for number in self._own]

    def _put(
        self,
        name: str,
        parts: Sequence[Part],
        kept: Kept,
        dtype: jnp.dtype,
        cut: Cut | None,
        *,
        memory: str | None = None,
    ) -> jax.Array | QTensor:
        """Puts parts on their devices, as one weight.

        Args:
            memory: memory of the devices, as JAX names it; None: their default memory.
        """
        if cut is None:
            return self._one(name, parts[0], kept, dtype, self._platform.everywhere_in(memory))
        made = [
            self._one(f"{name} on {number}", part, kept, dtype, SingleDeviceSharding(device, memory_kind=memory))
            for (number, device), part in zip(self._own.items(), parts, strict=True)
        ]
        first = made[0]
        if not isinstance(first, QTensor):
            return self._joined(made, cut.axis)
        # What describes the matrix is what describes each part: programs see one.
        columns = first.columns
        if columns is not None and cut.axis == 0 and columns.ndim > 1:
            columns = self._joined([part.columns for part in made], 0)
        elif columns is not None:
            columns = on_devices(np.asarray(columns), self._platform.everywhere_in(memory))
        return replace(first, words=self._joined([part.words for part in made], cut.axis), columns=columns)

    def _joined(self, parts: Sequence[Any], axis: int) -> jax.Array:
        """The array whose parts lie on the devices, of which these are this process's."""
        sharding = self._platform.sharding
        assert sharding is not None
        shape = list(parts[0].shape)
        shape[axis] *= sharding.mesh.size
        spec = PartitionSpec(*[None] * axis, *sharding.mesh.axis_names)
        place = NamedSharding(sharding.mesh, spec, memory_kind=parts[0].sharding.memory_kind)
        return jax.make_array_from_single_device_arrays(tuple(shape), place, list(parts))

    def _one(
        self, name: str, part: Part, kept: Kept, dtype: jnp.dtype, place: jax.sharding.Sharding
    ) -> jax.Array | QTensor:
        if isinstance(part, np.ndarray):
            return on_devices(part, place)
        return put(
            part,
            self._packed.words(name, part, tile=self._platform.weight_tile),
            dtype=dtype,
            activations=self._activations_of(kept),
            device=place,
        )

    def _activations_of(self, kept: Kept) -> str:
        return self._activations if kept.activations == "auto" else kept.activations


def _split(part: Part, count: int) -> tuple[Part, Part]:
    """A stack without its last ``count`` matrices, and these; plain numbers as unsigned integers of their size."""
    if isinstance(part, np.ndarray):
        return part[:-count], part[-count:].view(np.dtype(f"u{part.itemsize}"))
    assert isinstance(part, RowStack)
    stack, resident = part, part.count - count
    return RowStack(resident, stack.matrix), RowStack(count, lambda index: stack.matrix(resident + index))
