"""Images in prompts: where they stand, what follows from them for tokens and pages, and what is to be encoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from llmjax.arrays import Ints
from llmjax.media.image import PreparedImage


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptImage:
    """An image in a prompt.

    Attributes:
        start, end: its tokens, with those that stand between its rows.
        rows: i32 [num_rows], the tokens in whose place its feature rows go, as indices into the prompt.
        image: what is encoded.
    """

    start: int
    end: int
    rows: Ints
    image: PreparedImage


@dataclass(frozen=True)
class Whole:
    """Tokens of a prompt that see one another, so all of them are computed in one step.

    Attributes:
        start, end: the tokens, and others between them.
        digest: a hash of what they see beside the tokens before them and their images; empty: nothing.
        tokens: i32 [n], which of ``start : end`` they are; None: all. Others see those before them.
    """

    start: int
    end: int
    digest: bytes = b""
    tokens: Ints | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptMedia:
    """The images of a prompt, and what follows from them for its tokens.

    Attributes:
        images: in the order of the prompt.
        axes: i32 [3, n], position of each token of the prompt on each axis; None: tokens have one position.
        delta: what is added to the index of a later token to get its position on every axis.
        wholes: groups of tokens that see one another, in order: those of each image, or of all, or the prompt.
    """

    images: tuple[PromptImage, ...]
    axes: Ints | None = None
    delta: int = 0
    wholes: tuple[Whole, ...] = ()

    @property
    def end(self) -> int:
        """The first token after the last image, and after all tokens that see later ones."""
        return max(self.images[-1].end, self.wholes[-1].end if self.wholes else 0)

    def between(self, start: int, end: int) -> Iterator[tuple[int, PromptImage]]:
        """The images that have tokens among ``start : end``, with their numbers."""
        for number, image in enumerate(self.images):
            if image.start < end and start < image.end:
                yield number, image

    def others(self, tokens: Sequence[int]) -> list[int]:
        """A prompt's tokens but for those in whose place rows of images go, which may be none of the vocabulary."""
        rows = {int(row) for image in self.images for row in image.rows}
        return [token for place, token in enumerate(tokens) if place not in rows]

    def marks(self, start: int, end: int) -> bytes:
        """What tells a page with the tokens ``start : end`` from one with the same tokens and other images; empty:
        there are no images in it."""
        found = [
            one.image.digest + (start - one.start).to_bytes(8, "little", signed=True)
            for _, one in self.between(start, end)
        ]
        found += [one.digest for one in self.wholes if one.start < end and start < one.end]
        return b"".join(found)

    def floor(self, tokens: int) -> int:
        """The most of the first ``tokens`` tokens that do not end inside a group that is computed in one step."""
        return next((one.start for one in self.wholes if one.start < tokens < one.end), tokens)


@dataclass(frozen=True, eq=False)
class EncoderAdapter:
    """What the adapters of a request change of the encoder of images.

    Attributes:
        digest: identifies the adapters.
        values: what the device takes beside the encoder's weights.
    """

    digest: str
    values: list[npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Encoding:
    """An image to encode before the next step.

    Attributes:
        places: i32 [num_rows], rows of the device's pool that its feature rows go to.
        adapter: what changes the encoder for it; None: nothing does.
    """

    image: PreparedImage
    places: Ints
    adapter: EncoderAdapter | None = None

    @property
    def key(self) -> bytes:
        """What tells its feature rows from others."""
        return key_of(self.image, self.adapter)


def key_of(image: PreparedImage, adapter: EncoderAdapter | None) -> bytes:
    """What tells the feature rows of an image from others: its digest, and that of adapters that change them."""
    return image.digest if adapter is None else image.digest + adapter.digest.encode()
