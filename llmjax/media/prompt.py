"""A prompt's tokens with its pictures in them, and the positions of models that have three axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmjax.errors import InvalidRequest
from llmjax.media.image import PreparedImage, PreparedVideo


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
    removed: bool = False

    def around(self, ids: Sequence[int], placeholder: Sequence[int]) -> list[int]:
        """A prompt with pictures, with these ids where they belong and nowhere else."""
        sought, found = list(placeholder), list(ids)
        if found[: len(self.start)] == list(self.start):
            del found[: len(self.start)]
        if self.removed:
            return found[: -len(self.end)] if found[-len(self.end) :] == list(self.end) else found
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
    counted: Sequence[Sequence[int]] = (),
    frame: Frame | None = None,
    fence: int | None = None,
) -> MediaPrompt:
    """Replaces each placeholder by the tokens of a picture, in order.

    Args:
        ids: the prompt with one placeholder for each picture.
        placeholder: the ids of one placeholder.
        line_breaks: ids of one, two and more line breaks, where those beside a picture join its own. For both see
            ``ImageProcessor``.
        counted: ids that stand before each picture, by its number; empty: there are none.
        frame: what stands around the text of a prompt with pictures.
        fence: the token that begins and ends each picture's, once between two side by side; None: there is none.

    Raises:
        InvalidRequest: there are more or fewer placeholders than pictures.
    """
    if frame is not None and images:
        ids = frame.around(ids, placeholder)
    places = _places(ids, placeholder)
    if len(places) != len(images):
        raise InvalidRequest(f"the prompt has {len(places)} image placeholders, but there are {len(images)} images")
    if counted and len(images) > len(counted):
        raise InvalidRequest(f"there are {len(images)} images; a prompt may have {len(counted)}")
    out: list[int] = []
    spans: list[MediaSpan] = []
    done = 0
    for index, (place, image) in enumerate(zip(places, images, strict=True)):
        out = [part for parts in _joined(out, list(ids[done:place]), line_breaks) for part in parts]
        out += counted[index] if counted else ()
        out, tokens = _joined(out, list(image.tokens), line_breaks)
        tokens = tokens[1:] if fence is not None and out[-1:] == [fence] else tokens
        spans.append(MediaSpan(len(out), len(tokens), index))
        out += tokens
        done = place + len(placeholder)
    out = [part for parts in _joined(out, list(ids[done:]), line_breaks) for part in parts]
    return MediaPrompt(tuple(out), tuple(spans))


def with_videos(
    ids: Sequence[int],
    images: Sequence[PreparedImage],
    videos: Sequence[PreparedVideo],
    *,
    placeholder: Sequence[int],
    video_placeholder: Sequence[int],
    texts: Callable[[Sequence[float], bool], tuple[list[int], list[int]]],
) -> tuple[list[int], list[PreparedImage]]:
    """A prompt in which each video is a picture for each patch's frames, with the texts around them.

    Args:
        ids: the prompt with one placeholder for each picture and each video.
        texts: makes the ids before and after a patch's frames of their times, and of whether they are the first.

    Returns:
        The prompt with a placeholder for each picture, and the pictures in its order.

    Raises:
        InvalidRequest: there are more or fewer placeholders than pictures or videos.
    """
    at_images, at_videos = _places(ids, placeholder), _places(ids, video_placeholder)
    for kind, places, given in (("image", at_images, images), ("video", at_videos, videos)):
        if len(places) != len(given):
            raise InvalidRequest(
                f"the prompt has {len(places)} {kind} placeholders, but there are {len(given)} {kind}s"
            )
    out: list[int] = []
    pictures: list[PreparedImage] = []
    done, left = 0, iter(images)
    for place, video in zip(at_videos, videos, strict=True):
        pictures += [next(left) for at in at_images if done <= at < place]
        out += ids[done:place]
        for number, (picture, times) in enumerate(zip(video.pictures, video.times, strict=True)):
            before, after = texts(times, not number)
            out += [*before, *placeholder, *after]
            pictures.append(picture)
        done = place + len(video_placeholder)
    return [*out, *ids[done:]], [*pictures, *left]


def _places(ids: Sequence[int], sought: Sequence[int]) -> list[int]:
    """Where a placeholder stands."""
    wanted, places, at = list(sought), [], 0
    while at + len(wanted) <= len(ids):
        found = list(ids[at : at + len(wanted)]) == wanted
        places += [at] if found else []
        at += len(wanted) if found else 1
    return places


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
    count from there; text goes on after the longest of them. So it is for a video's frames, each at its moment.

    Args:
        images: the prompt's pictures, by ``MediaSpan.image_index``.
        row_token: the id at which feature rows stand.
        merge: patches along each side that become one row.

    Returns:
        i32 [3, n], and what to add to a later token's index to get its position, on every axis.
    """
    ids = np.asarray(prompt.ids)
    positions = np.empty((3, len(ids)), np.int32)
    current, done, start = 0, 0, 0
    for span in prompt.spans:
        image = images[span.image_index]
        frames, height, width = image.grid
        height, width = height // merge, width // merge
        token = row_token if image.row_token is None else image.row_token
        found = np.flatnonzero(ids[span.start : span.start + span.length] == token)
        first, moment = span.start + int(found[0]), image.moment or 0
        if len(found) != frames * height * width or found[-1] - found[0] + 1 != len(found):
            raise InvalidRequest(f"image {span.image_index + 1} has {len(found)} rows, which is not its grid")
        positions[:, done:first] = current + np.arange(first - done)
        current += first - done
        grid = np.stack(np.meshgrid(np.arange(frames), np.arange(height), np.arange(width), indexing="ij"))
        if image.moment is None or first > done or not done:  # else it goes on with a video's rows and columns
            start = current
        grid[0] += moment
        positions[:, first : first + len(found)] = start + grid.reshape(3, -1)
        current = max(current, start + max(height, width, frames + moment))
        done = first + len(found)
    positions[:, done:] = current + np.arange(len(ids) - done)
    return positions, (int(positions.max()) + 1 if len(ids) else 0) - len(ids)
