"""The program that encodes images: their patches become rows of the media pool."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.engine.device.media import MediaState
from llmjax.models.vision.batch import PatchBatch
from llmjax.models.vision.packing import num_rows, pack

if TYPE_CHECKING:
    from llmjax.models.vision.functional import EncoderGraph


def encode_images(
    weights: tuple[jax.Array, ...],
    media: MediaState,
    places: jax.Array,
    batch: PatchBatch,
    *,
    graph: EncoderGraph,
    names: tuple[str, ...],
) -> MediaState:
    """The pool with the rows of a batch of images.

    Args:
        weights: the encoder's weights in the order of ``names``.
        media: donated.
        places: i32 [N], where the batch's rows go; rows of padding go where the pool has none.
        graph: the encoder (static).
        names: names of the weights (static).
    """
    from llmjax.models.vision.functional import encode  # with Flax, which a warm start does without

    encoded = encode(graph, dict(zip(names, weights, strict=True)), batch)
    rows = jnp.concatenate((encoded.rows[None], encoded.tapped))  # [1 + K, N, D]
    return replace(media, rows=media.rows.at[:, places].set(rows.astype(media.rows.dtype), mode="drop"))


def batch_shapes(graph: EncoderGraph, patches: int) -> tuple[np.ndarray[Any, Any], PatchBatch]:
    """Arrays like those that the program for a number of patches takes: places, and a batch without images."""
    empty: Any = pack(graph.spec, [], patches=patches)
    return np.zeros(num_rows(graph.spec, patches), np.int32), PatchBatch(**empty)
