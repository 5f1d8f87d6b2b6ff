"""A prompt's tokens with its pictures in them, and the positions of models that have three axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmjax.errors import InvalidRequest
from llmjax.media.image import PreparedImage


@dataclass(frozen=True)
class MediaSpan:
    """The tokens of one picture in a prompt: feature rows, and whatever stands between and around them."""

    start: int  # index of the first token
    length: int
    image_index: int


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt in which every picture has its tokens."""

    ids: tuple[int, ...]
    spans: tuple[MediaSpan, ...]  # in the order of the prompt


@dataclass(frozen=True)
class Frame:
    """The ids of a ``Framed``."""

    start: tuple[int, ...]
    end: tuple[int, ...]

    def around(self, ids: Sequence[int], placeholder: Sequence[int]) -> list[int]:
        """A prompt with pictures, with these ids where they belong and nowhere else."""
        sought, found = list(placeholder), list(ids)
        if found[: len(self.start)] == list(self.start):
            del found[: len(self.start)]
        places = [at for at in range(len(found)) if found[at : at + len(sought)] == sought]
        if places and found[(after := places[-1] + len(sought)) :][: len(self.start)] != list(self.start):
            found[after:after] = self.start
        return found if found[-len(self.end) :] == list(self.end) else [*found, *self.end]


def with_images(
    ids: Sequence[int],
    images: Sequence[PreparedImage],
    *,
    placeholder: Sequence[int],
    line_breaks: Sequence[int] = (),
    frame: Frame | None = None,
) -> MediaPrompt:
    """Replaces each placeholder by the tokens of a picture, in order.

    Args:
        ids: the prompt with one placeholder for each picture.
        placeholder: the ids of one placeholder.
        line_breaks: ids of one, two and more line breaks, where those beside a picture join its own. For both see
            ``ImageProcessor``.
        frame: what stands around the text of a prompt with pictures.

    Raises:
        InvalidRequest: there are more or fewer placeholders than pictures.
    """
    sought = tuple(placeholder)
    if frame is not None and images:
        ids = frame.around(ids, sought)
    places: list[int] = []
    at = 0
    while at + len(sought) <= len(ids):
        if tuple(ids[at : at + len(sought)]) == sought:
            places.append(at)
            at += len(sought)
        else:
            at += 1
    if len(places) != len(images):
        raise InvalidRequest(f"the prompt has {len(places)} image placeholders, but there are {len(images)} images")
    out: list[int] = []
    spans: list[MediaSpan] = []
    done = 0
    for index, (place, image) in enumerate(zip(places, images, strict=True)):
        out = [part for parts in _joined(out, list(ids[done:place]), line_breaks) for part in parts]
        out, tokens = _joined(out, list(image.tokens), line_breaks)
        spans.append(MediaSpan(len(out), len(tokens), index))
        out += tokens
        done = place + len(sought)
    out = [part for parts in _joined(out, list(ids[done:]), line_breaks) for part in parts]
    return MediaPrompt(tuple(out), tuple(spans))


def _joined(before: list[int], after: list[int], line_breaks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Two lists of ids with the line breaks where they meet made one token, at the end of the first."""
    sizes = {token: count for count, token in enumerate(line_breaks, start=1)}
    end, start = len(before), 0
    while end and before[end - 1] in sizes:
        end -= 1
    while start < len(after) and after[start] in sizes:
        start += 1
    total = sum(sizes[token] for token in before[end:] + after[:start])
    if end == len(before) or not start or total > len(line_breaks):
        return before, after
    return [*before[:end], line_breaks[total - 1]], after[start:]


def mrope_positions(
    prompt: MediaPrompt, images: Sequence[PreparedImage], *, row_token: int, merge: int
) -> tuple[NDArray[np.int32], int]:
    """Positions on three axes (time, row, column) of a prompt's tokens (Qwen2-VL, arXiv:2409.12191, section 2.1).

    A text token has one position on all axes. A picture's rows share the time at which it starts, and rows and columns
    count from there; text goes on after the longer side.

    Args:
        images: the prompt's pictures, by ``MediaSpan.image_index``.
        row_token: the id at which feature rows stand.
        merge: patches along each side that become one row.

    Returns:
        i32 [3, n], and what to add to a later token's index to get its position, on every axis.
    """
    ids = np.asarray(prompt.ids)
    positions = np.empty((3, len(ids)), np.int32)
    current, done = 0, 0
    for span in prompt.spans:
        frames, height, width = images[span.image_index].grid
        height, width = height // merge, width // merge
        found = np.flatnonzero(ids[span.start : span.start + span.length] == row_token)
        first = span.start + int(found[0])
        if len(found) != frames * height * width or found[-1] - found[0] + 1 != len(found):
            raise InvalidRequest(f"image {span.image_index + 1} has {len(found)} rows, which is not its grid")
        positions[:, done:first] = current + np.arange(first - done)
        current += first - done
        grid = np.stack(np.meshgrid(np.arange(frames), np.arange(height), np.arange(width), indexing="ij"))
        positions[:, first : first + len(found)] = current + grid.reshape(3, -1)
        current += max(height, width, frames)
        done = first + len(found)
    positions[:, done:] = current + np.arange(len(ids) - done)
    return positions, (int(positions.max()) + 1 if len(ids) else 0) - len(ids)
