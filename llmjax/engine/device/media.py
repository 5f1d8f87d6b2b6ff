"""Images on the device: the pool of their feature rows, and what a step's tokens take from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from llmjax.arrays import Ints
from llmjax.engine.core.media_rows import MediaRows
from llmjax.engine.core.scheduler import Row
from llmjax.models.layers.seen import Seen

NO_ROW = -1  # in ``places``: the token is embedded by its id
BY_INDEX = -1  # in ``axes``: the position follows from the token's index


@dataclass(frozen=True)
class MediaShape:
    """What the steps of a model that sees have beside those of others.

    Attributes:
        num_rows: rows of the pool, M.
        size: entries of a row, D.
        dtype: the name of their type.
        extra: rows that are added to the residual stream after each of the first layers, beside the embedding, K.
        axes: whether a token has positions on three axes.
        whole: whether tokens of a prompt with images see later ones.
    """

    num_rows: int
    size: int
    dtype: str
    extra: int = 0
    axes: bool = False
    whole: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MediaState:
    """The media pool, and what the positions of sequences with images are moved by."""

    rows: jax.Array  # [1 + K, M, D]: embeddings, and what is added after each of the first K layers
    delta: jax.Array  # i32 [S]
    has_axes: bool = field(metadata={"static": True})  # whether a token has positions on three axes

    def seen(self, batch: MediaBatch | None, *, slot: jax.Array, position: jax.Array) -> Seen:
        """What a model sees in a step.

        Args:
            batch: the images among its tokens; None: there can be none.
            slot, position: i32 [T], of each token.
        """
        later, axes = position + self.delta[slot], None
        if self.has_axes:
            axes = jnp.broadcast_to(later, (3, *later.shape))
        if batch is None:
            return Seen(axes=axes)
        if batch.axes is not None:
            axes = jnp.where(batch.axes == BY_INDEX, later, batch.axes)
        last_key = None if batch.last_key is None else jnp.maximum(batch.last_key, position)
        return Seen(axes=axes, places=batch.places, rows=self.rows, last_key=last_key)


def make_media_state(shape: MediaShape, *, num_slots: int) -> MediaState:
    """An empty pool."""
    rows = jnp.zeros((1 + shape.extra, shape.num_rows, shape.size), jnp.dtype(shape.dtype))
    return MediaState(rows=rows, delta=jnp.zeros(num_slots, jnp.int32), has_axes=shape.axes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MediaBatch:
    """What a mixed step's tokens have of images. T tokens."""

    places: jax.Array  # i32 [T], rows of the pool in place of embeddings; NO_ROW: none
    axes: jax.Array | None  # i32 [3, T]; BY_INDEX: the token's index, moved by ``delta``
    last_key: jax.Array | None  # i32 [T], the last token that a token sees, if it is not itself; else NO_ROW

    @classmethod
    def of(cls, part: Mapping[str, jax.Array]) -> MediaBatch | None:
        """The images in a batch that has been taken apart; None: it has no place for them."""
        if (places := part.get("media_places")) is None:
            return None
        return cls(places, part.get("media_axes"), part.get("media_last_key"))


def part_shapes(shape: MediaShape, *, tokens: int, rows: int, images: bool) -> dict[str, tuple[int, ...]]:
    """The parts of a packed batch that are about images, by name.

    Args:
        images: whether the batch's tokens may be of images.
    """
    parts: dict[str, tuple[int, ...]] = {"new_delta": (rows,)} if shape.axes else {}
    if images:
        parts["media_places"] = (tokens,)
        if shape.axes:
            parts["media_axes"] = (3, tokens)
        if shape.whole:
            parts["media_last_key"] = (tokens,)
    return parts


def pack_media(part: dict[str, Ints], rows: Iterable[Row], media: MediaRows) -> None:
    """Fills the parts of `part_shapes`, which hold -1, for rows of a mixed batch."""
    at = 0
    for row in rows:
        sequence, start = row.sequence, row.start
        end = start + row.count
        if (own := sequence.request.media) is not None and start < sequence.num_prompt_tokens:
            for number, image in own.between(start, end):
                here = (image.rows >= start) & (image.rows < end)
                part["media_places"][at + image.rows[here] - start] = media.places(sequence, number)[here]
            for whole in own.wholes if "media_last_key" in part else ():
                inside = slice(at + max(whole.start - start, 0), at + max(min(whole.end, end) - start, 0))
                if whole.tokens is None:
                    part["media_last_key"][inside] = whole.end - 1
                else:
                    own_tokens = whole.tokens[(whole.tokens >= start) & (whole.tokens < end)]
                    part["media_last_key"][at + own_tokens - start] = whole.end - 1
            if own.axes is not None:
                axes = own.axes[:, start:end]
                part["media_axes"][:, at : at + axes.shape[1]] = axes
        at += row.count + len(row.drafts)


def delta_of(row: Row) -> int:
    """What moves the positions of a row's sequence."""
    media = row.sequence.request.media
    return 0 if media is None else media.delta
