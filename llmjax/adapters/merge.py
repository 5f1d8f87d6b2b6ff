"""Merges an adapter into a checkpoint: its tensors are the sums, computed when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from llmjax.adapters.adapter import Adapter, Floats, LowRank
from llmjax.adapters.read import EMBEDDING, HEAD
from llmjax.checkpoint import Checkpoint
from llmjax.checkpoint.stored_tensor import Derived, StoredTensor
from llmjax.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class Merged(Derived):
    """A matrix, or a stack of them, with what an adapter changes of it. Sums are f32, and rounded once.

    Attributes:
        part: the change.
        looked_up: whether the rows of the matrix are looked up, so that the change is of its transpose.
    """

    part: LowRank
    looked_up: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sources[0].shape

    def read(self, dtype: np.dtype) -> np.ndarray:
        values: Floats = self.sources[0].read(np.dtype(np.float32))
        change = self.part.delta()
        gain = self.part.gain
        values = values if gain is None else values * gain[:, None]
        return (values + (change.T if self.looked_up else change)).astype(dtype)


@dataclass(frozen=True, eq=False)
class MergedBias(Derived):
    """A bias with what an adapter adds to it."""

    added: Floats

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sources[0].shape

    def read(self, dtype: np.dtype) -> np.ndarray:
        return (self.sources[0].read(np.dtype(np.float32)) + self.added).astype(dtype)


def merged(base: Checkpoint, adapter: Adapter) -> Checkpoint:
    """A checkpoint with an adapter merged into its weights.

    Args:
        adapter: one that was read for this checkpoint.

    Raises:
        CheckpointError: a matrix that it changes is quantized, or has no bias to which the adapter's could be added.
    """
    tensors = _with(base, base.tensors, adapter.parts)
    of_encoder = _with(base, base.vision_tensors, adapter.of_encoder)
    return replace(base, tensors=MappingProxyType(tensors), vision_tensors=MappingProxyType(of_encoder))


def _with(
    base: Checkpoint, before: Mapping[str, StoredTensor], parts: Mapping[str, LowRank]
) -> dict[str, StoredTensor]:
    """Tensors of the checkpoint with an adapter's parts of them."""
    tensors = dict(before)
    for name, part in parts.items():
        source = before[EMBEDDING if name == HEAD and name not in before else name]
        _check(base, name, source)
        tensors[name] = Merged(name, (source,), part, name == EMBEDDING)
        if part.bias is not None:
            of_bias = f"{name.removesuffix('.weight')}.bias"
            if of_bias not in before:
                raise CheckpointError(
                    f"{base.path}: {of_bias} is missing, so the adapter's bias cannot be merged; serve the adapter "
                    "beside the weights (enable_lora)"
                )
            tensors[of_bias] = MergedBias(of_bias, (before[of_bias],), part.bias)
    return tensors


def _check(base: Checkpoint, name: str, source: StoredTensor) -> None:
    if source.row_source() is not None:
        raise CheckpointError(
            f"{base.path}: {name} is stored as {source.type_name}; an adapter merged into quantized weights is mostly "
            "rounded away, so serve it beside them (enable_lora and lora_modules), or merge it into the original"
        )
