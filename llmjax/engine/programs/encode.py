"""The programs that encode images, each a part of the encoder's layers: patches become rows of the media pool."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.engine.adapters.layout import AdapterLayout
from llmjax.engine.adapters.of_encoder import with_adapter
from llmjax.engine.device.media import MediaState
from llmjax.models.layers.mlp import GatedMLP
from llmjax.models.vision.batch import PatchBatch
from llmjax.models.vision.packing import num_rows, pack
from llmjax.models.vision.spec import VisionLayer, VisionSpec

if TYPE_CHECKING:
    from llmjax.models.vision.encoder import Underway
    from llmjax.models.vision.functional import EncoderGraph


def encode_part(
    weights: tuple[jax.Array, ...],
    media: MediaState | None,
    places: jax.Array | None,
    batch: PatchBatch,
    underway: Underway | None,
    adapter: tuple[jax.Array, ...] | None = None,
    *,
    graph: EncoderGraph,
    names: tuple[str, ...],
    first: int,
    end: int,
    layout: AdapterLayout | None = None,
) -> Underway | MediaState:
    """Takes a batch of images through some of an encoder's layers.

    Args:
        weights: the encoder's weights in the order of ``names``.
        media: donated, where these are the last layers; else None.
        places: i32 [N], where the batch's rows go, if these are the last layers; rows of padding go where the pool has
            none.
        batch: its patches are looked at before the first layer alone.
        underway: what the part before has made of the batch, donated if these are not the last layers; None: these are
            the first ones.
        adapter: the values of the adapter with which the images are encoded; None: there is none.
        graph: the encoder (static).
        names: names of the weights (static).
        first, end: the layers (static).
        layout: how the adapter's values are laid out (static).

    Returns:
        What the next part takes, or the pool with the batch's rows.
    """
    from llmjax.models.vision.functional import encoder_of  # with Flax, which a warm start does without

    params: dict[str, Any] = dict(zip(names, weights, strict=True))
    if adapter is not None:
        assert layout is not None
        params = with_adapter(params, adapter, layout)
    encoder = encoder_of(graph, params)
    underway = encoder.through(encoder.begin(batch) if underway is None else underway, batch, range(first, end))
    if media is None:
        return underway
    encoded = encoder.end(underway, batch)
    rows = jnp.concatenate((encoded.rows[None], encoded.tapped))  # [1 + K, N, D]
    return replace(media, rows=media.rows.at[:, places].set(rows.astype(media.rows.dtype), mode="drop"))


def batch_shapes(graph: EncoderGraph, patches: int) -> tuple[np.ndarray[Any, Any], PatchBatch]:
    """Arrays like those that the programs for a number of patches take: places, and a batch without images."""
    empty: Any = pack(graph.spec, [], patches=patches)
    return np.zeros(num_rows(graph.spec, patches), np.int32), PatchBatch(**empty)


def parts_of(spec: VisionSpec, patches: int, *, products: float) -> list[range]:
    """The layers of each part of an encoder's run.

    Args:
        patches: the number of patches in a batch.
        products: multiplications of a part at most; a layer is never divided.
    """
    parts, left = [range(0)], products
    for number, layer in enumerate(spec.layers):
        cost = _products(spec, layer, patches)
        if cost > left and len(parts[-1]):
            parts.append(range(number, number))
            left = products
        parts[-1] = range(parts[-1].start, number + 1)
        left -= cost
    return parts


def _products(spec: VisionSpec, layer: VisionLayer, patches: int) -> float:
    """Multiplications of a layer."""
    inner = layer.attention.heads * layer.attention.head_dim
    seen = spec.window**2 if layer.windowed and spec.window else min(patches, spec.tile or spec.longest or patches)
    matrices = 3 if isinstance(layer.feed_forward, GatedMLP) else 2
    return patches * (4.0 * spec.size * inner + matrices * spec.size * layer.feed_forward.inner + 2.0 * seen * inner)
