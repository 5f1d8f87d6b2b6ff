"""Weights from files to where they stay, one after another, so that memory holds hardly more than them."""

from __future__ import annotations

from collections import deque

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.checkpoint.stored_tensor import StoredTensor
from llmjax.errors import ConfigError
from llmjax.kernels.offloading import HOST_MEMORY, SplitStack
from llmjax.kernels.qtensor import QTensor
from llmjax.platforms import Platform
from llmjax.quantization.plan import Kept
from llmjax.weights.packing import RowSource, RowStack, put

TRANSFERS = 2  # weights on their way to the device at a time: the host holds them until they are there


class Placer:
    """Puts weights on a device.

    Args:
        platform: the device, and how it wants quantized matrices.
        activations: what products with quantized matrices round activations to, unless a matrix says.
        offloaded: the last so many experts of each stack go to the host's memory instead.

    Raises:
        ConfigError: the device cannot read that.
    """

    def __init__(self, platform: Platform, *, activations: str, offloaded: int = 0) -> None:
        self._platform = platform
        self._device = jax.sharding.SingleDeviceSharding(platform.device)
        if offloaded and HOST_MEMORY not in {memory.kind for memory in platform.device.addressable_memories()}:
            raise ConfigError(f"num_experts_offload_per_rank: {platform.device} cannot read the host's memory")
        kind = HOST_MEMORY if offloaded else None
        self._host = jax.sharding.SingleDeviceSharding(platform.device, memory_kind=kind)
        self._activations = activations
        self._offloaded = offloaded
        self._under_way: deque[jax.Array | QTensor | SplitStack] = deque()

    def place(
        self, name: str, tensor: StoredTensor, kept: Kept, shape: jax.ShapeDtypeStruct
    ) -> jax.Array | QTensor | SplitStack:
        """Reads a tensor and starts its way to the device; waits for those before the last ones.

        Args:
            name: in the model.
            kept: what becomes of it.
            shape: that the model wants, with its dtype.
        """
        weight: jax.Array | QTensor | SplitStack
        if self._offloaded and ".experts." in name and len(shape.shape) == 3:
            weight = self._split(tensor, kept, shape)
        elif kept.source is None:
            weight = jax.device_put(tensor.read(np.dtype(shape.dtype)), self._device)
        else:
            weight = self._put(kept.source, kept, shape.dtype, self._device)
        self._under_way.append(weight)
        if len(self._under_way) > TRANSFERS:
            jax.block_until_ready(self._under_way.popleft())
        return weight

    def _split(self, tensor: StoredTensor, kept: Kept, shape: jax.ShapeDtypeStruct) -> SplitStack:
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
            self._put(here, kept, shape.dtype, self._device), self._put(there, kept, shape.dtype, self._host)
        )

    def _put(self, source: RowSource | RowStack, kept: Kept, dtype: jnp.dtype, place: jax.sharding.Sharding) -> QTensor:
        return put(
            source,
            tile=self._platform.weight_tile,
            dtype=dtype,
            activations=self._activations if kept.activations == "auto" else kept.activations,
            device=place,
        )
