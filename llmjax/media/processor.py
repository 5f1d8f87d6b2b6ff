"""What turns a picture's bytes into what a model's encoder takes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from llmjax.media.decoding import ImageLimits, decoded
from llmjax.media.image import PreparedImage
from llmjax.media.layouts import laid_out
from llmjax.media.prompt import Frame
from llmjax.models.vision.preparation import Preparation


class ImageProcessor(Protocol):
    """Makes a model's prepared images."""

    @property
    def placeholder(self) -> tuple[int, ...]:
        """Ids of the one placeholder that a picture has in a prompt before its tokens replace it."""

    @property
    def row_token_id(self) -> int:
        """The id at which feature rows stand among a prepared image's tokens."""

    @property
    def line_breaks(self) -> tuple[int, ...]:
        """Ids of one, two and more line breaks where those beside a picture join its own; else empty."""

    @property
    def frame(self) -> Frame | None:
        """What stands around the text of a prompt with pictures; None: nothing."""

    def prepare(self, data: bytes, *, several: bool = False) -> PreparedImage:
        """Decodes and prepares the picture in a file.

        Args:
            several: whether the prompt has other pictures too, which some families' layouts depend on.

        Raises:
            InvalidRequest: it is not a picture that is supported, or it is too large; the reason in one line.
        """


@dataclass(frozen=True)
class PillowProcessor:
    """An `ImageProcessor` that does with Pillow and NumPy what a `Preparation` says.

    Attributes:
        preparation: what is done.
        ids: the ids of each of the texts of which a picture's text is made.
        placeholder, row_token_id, line_breaks, frame: see ``ImageProcessor``.
        limits: how large pictures may be.
    """

    preparation: Preparation
    ids: Mapping[str, tuple[int, ...]]
    placeholder: tuple[int, ...]
    row_token_id: int
    line_breaks: tuple[int, ...] = ()
    limits: ImageLimits = field(default_factory=ImageLimits)
    frame: Frame | None = None

    def prepare(self, data: bytes, *, several: bool = False) -> PreparedImage:
        """See ``ImageProcessor.prepare``."""
        preparation = self.preparation
        picture = decoded(data, self.limits)
        laid = laid_out(picture.image, preparation, several=several)
        tiles = np.concatenate([patches_of(tile, preparation) for tile in laid.tiles])
        width, height = laid.tiles[0].size
        tokens: list[int] = []
        for part in preparation.text.parts(laid.arrangement):
            tokens += [self.row_token_id] * part if isinstance(part, int) else self.ids[part]
        settings = (picture.image.size, picture.mode, picture.orientation, several, preparation)
        return PreparedImage(
            patches=tiles,
            grid=(len(laid.tiles), height // preparation.patch, width // preparation.patch),
            num_rows=laid.arrangement.num_rows,
            tokens=tuple(tokens),
            digest=hashlib.sha256(repr(settings).encode() + b"\0" + picture.image.tobytes()).digest(),
            sources=laid.sources,
            shares=laid.shares,
        )


def patches_of(tile: Image.Image, preparation: Preparation) -> NDArray[np.float32]:
    """The patches of a tile in RGB, f32 [P, 3 * patch²], each channel by channel; square by square."""
    patch, side = preparation.patch, preparation.side
    # Rounded to f32 where transformers' processors without torch do.
    values = (np.asarray(tile).transpose(2, 0, 1) * np.float64(preparation.rescale)).astype(np.float32)
    mean, std = (np.array(each, np.float32)[:, None, None] for each in (preparation.mean, preparation.std))
    values = (values - mean) / std
    rows, columns = values.shape[1] // patch // side, values.shape[2] // patch // side
    squares = values.reshape(3, rows, side, patch, columns, side, patch).transpose(1, 4, 2, 5, 0, 3, 6)
    return np.ascontiguousarray(squares).reshape(-1, 3 * patch**2)
