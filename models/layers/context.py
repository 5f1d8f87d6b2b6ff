"""The inputs of a layer beside the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.rope import Rotation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """The step as one layer sees it."""

    rotation: Rotation | None  # rotation of the mixer's rope; None: it has none
    state: Any  # the mixer's LayerState, updated in place when donated
    batch: RaggedBatch  # which token belongs to which request, and where its keys go
    vector: jax.Array | None = None  # [T, P], in models with per-layer embeddings
    looked_up: jax.Array | None = (
        None  # [T, E], the rows that tokens stand for, where layers look them up; None: none do
    )
    chosen: jax.Array | None = None  # i32 [T, count], positions of the keys that the last indexer has chosen
