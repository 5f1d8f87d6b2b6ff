"""What a model will take of a device's memory, worked out from its files and settings before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import jax.numpy as jnp

from llmjax.checkpoint import StoredTensor
from llmjax.engine.memory import page_bytes_by_window
from llmjax.kernels.attention.types import KVLayout
from llmjax.models.config import ModelConfig
from llmjax.platforms import Platform
from llmjax.weights.packing import RowStack

KV_TYPES: Mapping[str, jnp.dtype] = MappingProxyType(
    {
        "float32": jnp.dtype(jnp.float32),
        "bfloat16": jnp.dtype(jnp.bfloat16),
        "int8": jnp.dtype(jnp.int8),
        "fp8": jnp.dtype(jnp.float8_e4m3fn),
    }
)
"""One of each size; float16 takes what bfloat16 takes."""


@dataclass(frozen=True)
class KVFootprint:
    """What the KV cache of one type takes.

    Attributes:
        token_bytes: of a token in the layers that keep all, scales included.
        window_bytes: window in tokens to bytes of a token in the layers that keep no more than that.
    """

    token_bytes: float
    window_bytes: Mapping[int, float]

    @property
    def first_token_bytes(self) -> float:
        """Bytes of a token that is within every window."""
        return self.token_bytes + sum(self.window_bytes.values())

    def tokens_in(self, num_bytes: float) -> int | None:
        """The longest sequence that fits in ``num_bytes``; None: every one does, for all layers have windows."""
        left, used, windows = max(num_bytes, 0), 0, dict(sorted(self.window_bytes.items()))
        for window in list(windows):
            each = self.token_bytes + sum(windows.values())
            if (longest := used + int(left / each)) < window:
                return longest
            left -= (window - used) * each
            used = window
            del windows[window]
        return used + int(left / self.token_bytes) if self.token_bytes else None


def kv_footprint(model: ModelConfig, dtype: jnp.dtype, *, page_size: int) -> KVFootprint:
    """The KV cache's needs of a model.

    Args:
        dtype: of the stored keys and values; one-byte types with a scale a token and head.
        page_size: tokens in a page.
    """
    pages = page_bytes_by_window(model, KVLayout.of(dtype, page_size=page_size))
    sizes = {window: size / page_size for window, size in pages.items()}
    return KVFootprint(sizes.get(None, 0.0), {window: size for window, size in sizes.items() if window is not None})


def weight_bytes(tensors: Mapping[str, StoredTensor], platform: Platform) -> int:
    """Bytes of a model's weights on the device: quantised matrices as they are kept there, others in its type.

    Args:
        tensors: of a checkpoint, by name; those that the model does not use count too.

    Raises:
        CheckpointError: a tensor's stored type is not supported.
    """
    total = 0
    for tensor in tensors.values():
        source = tensor.row_source() if len(tensor.shape) > 1 else None
        if source is None:
            total += prod(tensor.shape) * platform.dtype.itemsize
        else:
            tile = platform.weight_tile
            matrices = source.count if isinstance(source, RowStack) else 1
            total += matrices * -(-source.size_out // tile) * tile * source.format.num_words * 4
    return total
