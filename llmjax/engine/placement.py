"""Weights from files to where they stay, one after another, so that memory holds hardly more than them."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from llmjax.checkpoint.stored_tensor import StoredTensor
from llmjax.engine.packed_weights import PackedWeights
from llmjax.errors import ConfigError
from llmjax.kernels.offloading import HOST_MEMORY, SplitStack
from llmjax.kernels.qtensor import QTensor
from llmjax.kernels.sharding import on_devices
from llmjax.parallel.division import Cut
from llmjax.parallel.shards import cut_array, cut_source
from llmjax.platforms import Platform
from llmjax.quantization.plan import Kept
from llmjax.weights.packing import RowSource, RowStack, put

TRANSFERS = 2  # weights on their way to the device at a time: the host holds them until they are there


class Placer:
    """Puts weights on one or several devices.

    Args:
        platform: the devices, and how they want quantized matrices.
        activations: what products with quantized matrices round activations to, unless a matrix says.
        offloaded: the last so many experts of each stack go to the host's memory instead.
        packed: where packed matrices are kept from start to start.

    Raises:
        ConfigError: the device cannot read that.
    """

    def __init__(
        self, platform: Platform, *, activations: str, offloaded: int = 0, packed: PackedWeights | None = None
    ) -> None:
        self._platform = platform
        self._device = platform.everywhere
        if offloaded and HOST_MEMORY not in {memory.kind for memory in platform.device.addressable_memories()}:
            raise ConfigError(f"num_experts_offload_per_rank: {platform.device} cannot read the host's memory")
        kind = HOST_MEMORY if offloaded else None
        self._host = jax.sharding.SingleDeviceSharding(platform.device, memory_kind=kind)
        self._activations = activations
        self._offloaded = offloaded
        self._packed = PackedWeights() if packed is None else packed
        self._under_way: deque[jax.Array | QTensor | SplitStack] = deque()
        self.dequantized: list[str] = []  # names of matrices that cannot be cut as they are quantized

    def place(
        self, name: str, tensor: StoredTensor, kept: Kept, shape: jax.ShapeDtypeStruct, *, cut: Cut | None = None
    ) -> jax.Array | QTensor | SplitStack:
        """Reads a tensor and starts its way to the device; waits for those before the last ones.

        Args:
            name: in the model.
            kept: what becomes of it.
            shape: that the model wants, with its dtype.
            cut: which part of it each device has; None: all of it.
        """
        weight: jax.Array | QTensor | SplitStack
        if self._offloaded and ".experts." in name and len(shape.shape) == 3:
            weight = self._split(name, tensor, kept, shape)
        elif cut is not None:
            weight = self._divided(name, tensor, kept, shape, cut)
        elif kept.source is None:
            weight = on_devices(tensor.read(np.dtype(shape.dtype)), self._device)
        else:
            weight = self._put(name, kept.source, kept, shape.dtype, self._device)
        self._under_way.append(weight)
        if len(self._under_way) > TRANSFERS:
            jax.block_until_ready(self._under_way.popleft())
        return weight

    def _divided(
        self, name: str, tensor: StoredTensor, kept: Kept, shape: jax.ShapeDtypeStruct, cut: Cut
    ) -> jax.Array | QTensor:
        devices = self._platform.devices
        own = {devices.index(device): device for device in self._platform.own_devices}
        if kept.source is not None:
            parts = {number: cut_source(kept.source, cut, number) for number in own}
            whole = {number: part for number, part in parts.items() if part is not None}
            if len(whole) == len(parts):
                matrices = (
                    self._put(f"{name} on {number}", part, kept, shape.dtype, own[number])
                    for number, part in whole.items()
                )
                return self._joined_matrices(list(matrices), by_row=cut.axis == len(shape.shape) - 2)
            self.dequantized.append(name)
        values = tensor.read(np.dtype(shape.dtype))
        arrays = [jax.device_put(cut_array(values, cut, number), device) for number, device in own.items()]
        return self._joined(arrays, cut.axis)

    def _joined_matrices(self, parts: list[QTensor], *, by_row: bool) -> QTensor:
        """What describes the matrix is what describes each part: programs see one."""
        words, columns = parts[0].words, parts[0].columns
        axis = words.ndim - (3 if by_row else 2)  # tiles, or words of a record
        if columns is not None:
            columns = on_devices(np.asarray(columns), self._device)
        return replace(parts[0], words=self._joined([part.words for part in parts], axis), columns=columns)

    def _joined(self, parts: list[jax.Array], axis: int) -> jax.Array:
        """The array whose parts lie on the devices, of which these are this process's."""
        sharding = self._platform.sharding
        assert sharding is not None
        shape = list(parts[0].shape)
        shape[axis] *= sharding.mesh.size
        place = NamedSharding(sharding.mesh, PartitionSpec(*[None] * axis, *sharding.mesh.axis_names))
        return jax.make_array_from_single_device_arrays(tuple(shape), place, parts)

    def _split(self, name: str, tensor: StoredTensor, kept: Kept, shape: jax.ShapeDtypeStruct) -> SplitStack:
        resident = shape.shape[0] - self._offloaded
        source = kept.source
        if source is None:
            values = tensor.read(np.dtype(shape.dtype))
            bits = values[resident:].view(np.dtype(f"u{values.itemsize}"))
            return SplitStack(jax.device_put(values[:resident], self._device), jax.device_put(bits, self._host))
        assert isinstance(source, RowStack)
        matrix = source.matrix
        here, there = RowStack(resident, matrix), RowStack(self._offloaded, lambda index: matrix(resident + index))
        return SplitStack(
            self._put(name, here, kept, shape.dtype, self._device),
            self._put(f"{name} on the host", there, kept, shape.dtype, self._host),
        )

    def _put(
        self,
        name: str,
        source: RowSource | RowStack,
        kept: Kept,
        dtype: jnp.dtype,
        place: jax.sharding.Sharding | jax.Device,
    ) -> QTensor:
        return put(
            source,
            self._packed.words(name, source, tile=self._platform.weight_tile),
            dtype=dtype,
            activations=self._activations if kept.activations == "auto" else kept.activations,
            device=place,
        )
