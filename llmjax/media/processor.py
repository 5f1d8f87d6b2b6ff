"""What turns a picture's bytes into what a model's encoder takes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from llmjax.errors import InvalidRequest
from llmjax.media.decoding import ImageLimits, decoded
from llmjax.media.image import PreparedImage, PreparedVideo
from llmjax.media.layouts import Interpolated, laid_out, resized
from llmjax.media.prompt import Frame
from llmjax.media.sizes import smart_size
from llmjax.media.video import Frames, VideoLimits, decoded_video
from llmjax.models.vision.preparation import Fenced, Preparation, SmartResize


class ImageProcessor(Protocol):
    """Makes a model's prepared images."""

    @property
    def placeholder(self) -> tuple[int, ...]:
        """Ids of the one placeholder that a picture has in a prompt before its tokens replace it."""

    @property
    def row_token_id(self) -> int:
        """The id at which feature rows stand among a prepared image's tokens."""

    @property
    def row_token_ids(self) -> tuple[int, ...]:
        """All ids at which feature rows stand, ``row_token_id`` among them."""

    @property
    def video_placeholder(self) -> tuple[int, ...]:
        """The same of a video; empty: the model sees none."""

    @property
    def line_breaks(self) -> tuple[int, ...]:
        """Ids of one, two and more line breaks where those beside a picture join its own; else empty."""

    @property
    def counted(self) -> tuple[tuple[int, ...], ...]:
        """Ids that stand before the first picture of a prompt, before the second, and so on; empty: there are none."""

    @property
    def alone(self) -> int:
        """The most pictures that a prompt may have for each to be prepared as if it were alone."""

    @property
    def fence(self) -> int | None:
        """The token that stands around pictures, once between two side by side; None: there is none."""

    @property
    def first(self) -> tuple[int, ...]:
        """Ids that a prompt begins with, with pictures or without; empty: any."""

    @property
    def sole(self) -> bool:
        """Whether a prompt has no more than one picture, at its start."""

    @property
    def needed(self) -> bool:
        """Whether a prompt has at least one picture."""

    @property
    def single(self) -> bool:
        """Whether a picture has one row, which is its vector, and nothing is beside it in a prompt."""

    @property
    def page(self) -> tuple[int, ...]:
        """Ids of the prompt of a picture that is given alone, placeholder included; empty: there is none."""

    def spelled(self, text: str) -> str:
        """A prompt with the placeholder in place of other spellings of it."""

    @property
    def frame(self) -> Frame | None:
        """What stands around the text of a prompt with pictures; None: nothing."""

    def prepare(self, data: bytes, *, several: bool = False) -> PreparedImage:
        """Decodes and prepares the picture in a file.

        Args:
            several: whether the prompt has more pictures than ``alone``, which some families' layouts depend on.

        Raises:
            InvalidRequest: it is not a picture that is supported, or it is too large; the reason in one line.
        """

    def frame_texts(self, times: Sequence[float], *, first: bool) -> tuple[str, str]:
        """The texts before and after a patch's frames of a video, which are at these times, in seconds.

        Args:
            first: whether they are the video's first.
        """

    def prepare_video(self, video: bytes | Frames) -> PreparedVideo:
        """Decodes and prepares the video in a file, or frames of one.

        Raises:
            InvalidRequest: the model sees no videos; or it is none that is supported, or too large.
        """


@dataclass(frozen=True)
class PillowProcessor:
    """An `ImageProcessor` that does with Pillow and NumPy what a `Preparation` says.

    Attributes:
        preparation: what is done.
        ids: the ids of each of the texts of which a picture's text is made.
        placeholder, row_token_id, line_breaks, frame, counted, video_placeholder, first, page: see ``ImageProcessor``.
        limits, video_limits: how large pictures and videos may be.
    """

    preparation: Preparation
    ids: Mapping[str, tuple[int, ...]]
    placeholder: tuple[int, ...]
    row_token_id: int
    line_breaks: tuple[int, ...] = ()
    limits: ImageLimits = field(default_factory=ImageLimits)
    frame: Frame | None = None
    video_limits: VideoLimits = field(default_factory=VideoLimits)
    video_placeholder: tuple[int, ...] = ()
    counted: tuple[tuple[int, ...], ...] = ()
    first: tuple[int, ...] = ()
    page: tuple[int, ...] = ()

    @property
    def row_token_ids(self) -> tuple[int, ...]:
        """See ``ImageProcessor.row_token_ids``."""
        return (self.row_token_id, *(self.ids[text][0] for text in self.preparation.row_texts))

    @property
    def alone(self) -> int:
        """See ``ImageProcessor.alone``."""
        return self.preparation.alone

    @property
    def fence(self) -> int | None:
        """See ``ImageProcessor.fence``."""
        text = self.preparation.text
        return self.ids[text.fence][0] if isinstance(text, Fenced) else None

    @property
    def sole(self) -> bool:
        """See ``ImageProcessor.sole``."""
        return self.preparation.sole

    @property
    def needed(self) -> bool:
        """See ``ImageProcessor.needed``."""
        return self.preparation.needed

    @property
    def single(self) -> bool:
        """See ``ImageProcessor.single``."""
        return self.preparation.single

    def spelled(self, text: str) -> str:
        """See ``ImageProcessor.spelled``."""
        spelled, placed = self.preparation.spelled, self.preparation.respelled or self.preparation.placeholder
        return re.sub(spelled, lambda found: placed, text) if spelled else text

    def prepare(self, data: bytes, *, several: bool = False) -> PreparedImage:
        """See ``ImageProcessor.prepare``."""
        picture = decoded(data, self.limits)
        about = (picture.image.size, picture.mode, picture.orientation, several)
        return self._prepared(picture.image, self.preparation, about, several=several)

    def _prepared(
        self, image: Image.Image, preparation: Preparation, about: tuple[object, ...], *, several: bool = False
    ) -> PreparedImage:
        """A picture, or a frame that is laid out as one.

        Args:
            about: what decides the rows beside its values and the preparation.
        """
        laid = laid_out(image, preparation, several=several)
        tiles = np.concatenate([patches_of(tile, preparation) for tile in laid.tiles])
        grids = [
            (len(list(group)), height // preparation.patch, width // preparation.patch)
            for (width, height), group in groupby(tile.size for tile in laid.tiles)
        ]
        tokens: list[int] = []
        row_token = preparation.row_token if isinstance(preparation.row_token, int) else self.row_token_id
        for part in preparation.text.parts(laid.arrangement):
            tokens += [row_token] * part if isinstance(part, int) else self.ids[part]
        return PreparedImage(
            patches=tiles,
            grid=grids[0],
            further=tuple(grids[1:]),
            num_rows=laid.arrangement.num_rows,
            tokens=tuple(tokens),
            digest=hashlib.sha256(repr((*about, preparation)).encode() + b"\0" + image.tobytes()).digest(),
            sources=laid.sources,
            shares=laid.shares,
            unseen=laid.unseen,
            row_token=None if row_token == self.row_token_id else row_token,
        )

    def frame_texts(self, times: Sequence[float], *, first: bool) -> tuple[str, str]:
        """See ``ImageProcessor.frame_texts``."""
        video = self.preparation.video
        return ("", "") if video is None or video.text is None else video.text.texts(times, first=first)

    def prepare_video(self, video: bytes | Frames) -> PreparedVideo:
        """See ``ImageProcessor.prepare_video``."""
        how = self.preparation.video
        if how is None:
            raise InvalidRequest("this model sees pictures, but no videos")
        if isinstance(video, bytes):
            video = decoded_video(video, self.video_limits, how.sampling)
        images, indices = list(video.images), list(video.indices)
        if missing := -len(images) % how.frames:
            images, indices = images + images[-1:] * missing, indices + indices[-1:] * missing
        frame, layout = how.frame, how.frame.layout
        if not isinstance(layout, SmartResize):
            found = [self._prepared(image, frame, (image.size,)) for image in images]
            last = _ended(found[-1]) if how.ended else found[-1]
            return PreparedVideo((*found[:-1], last), tuple((index / video.fps,) for index in indices))
        assert isinstance(frame.row_token, int)
        # Files that are shorter than a patch count as one, as padded ones do.
        counted = max(len(video.images), how.frames) if how.together else 1
        size = smart_size(images[0].height, images[0].width, replace(layout, frames=counted))
        interval = 1.0 if how.pace is None else how.frames / video.sampled_fps * how.pace
        pictures, times = [], []
        for first in range(0, len(images), how.frames):
            part = slice(first, first + how.frames)
            frames = [resized(image, size, frame) for image in images[part]]
            # In f32, as transformers' positions are.
            moment = int(np.float32(first // how.frames) * np.float32(interval)) if how.text is None else None
            pictures.append(_picture(frames, frame, moment))
            times.append(tuple(index / video.fps for index in indices[part]))
        return PreparedVideo(tuple(pictures), tuple(times))


def _ended(frame: PreparedImage) -> PreparedImage:
    """A frame with the first learned row after its own."""
    assert frame.sources is not None and frame.shares is not None
    last = np.zeros((1, frame.sources.shape[1]))
    share = last.copy()
    last[0, 0], share[0, 0] = -1, 1
    return replace(
        frame,
        num_rows=frame.num_rows + 1,
        tokens=(*frame.tokens, frame.tokens[-1]),
        sources=np.concatenate([frame.sources, last]).astype(np.int32),
        shares=np.concatenate([frame.shares, share]).astype(np.float32),
        digest=hashlib.sha256(b"ended" + frame.digest).digest(),
    )


def _picture(frames: Sequence[Image.Image], preparation: Preparation, moment: int | None) -> PreparedImage:
    """The frames of a patch as one picture, whose tokens are its rows."""
    patch, side = preparation.patch, preparation.side
    values = np.stack([patches_of(frame, preparation) for frame in frames], axis=1)  # [P, frames, channels * patch²]
    patches = values.reshape(len(values), len(frames), 3, -1).swapaxes(1, 2).reshape(len(values), -1)
    rows, row_token = len(patches) // side**2, preparation.row_token
    assert isinstance(row_token, int)
    settings = repr((frames[0].size, moment, preparation)).encode()
    return PreparedImage(
        patches=np.ascontiguousarray(patches),
        grid=(1, frames[0].height // patch, frames[0].width // patch),
        num_rows=rows,
        tokens=(row_token,) * rows,
        digest=hashlib.sha256(b"\0".join([settings, *(frame.tobytes() for frame in frames)])).digest(),
        row_token=row_token,
        moment=moment,
    )


def patches_of(tile: Image.Image | Interpolated, preparation: Preparation) -> NDArray[np.float32]:
    """The patches of a tile in RGB, f32 [P, 3 * patch²], each channel by channel; square by square."""
    image = tile.image if isinstance(tile, Interpolated) else tile
    if preparation.in_bf16:
        return _squares(_in_bf16(image, preparation), preparation)
    # Rounded to f32 where transformers' processors without torch do.
    values = (np.asarray(image).transpose(2, 0, 1) * np.float64(preparation.rescale)).astype(np.float32)
    mean, std = (np.array(each, np.float32)[:, None, None] for each in (preparation.mean, preparation.std))
    values = (values - mean) / std
    if isinstance(tile, Interpolated):
        down, across = (bicubic(*each) for each in zip(values.shape[1:], tile.size[::-1], strict=True))
        values = (down @ values @ across.T).astype(np.float32)
    return _squares(values, preparation)


def _in_bf16(tile: Image.Image, preparation: Preparation) -> NDArray[np.float32]:
    """The values of a tile, f32 [3, H, W], of which each step is rounded to bfloat16."""

    def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
        return values.astype(ml_dtypes.bfloat16).astype(np.float32)

    values = np.asarray(tile).transpose(2, 0, 1).astype(np.float32)
    mean, std = (rounded(np.array(each, np.float32))[:, None, None] for each in (preparation.mean, preparation.std))
    return rounded(rounded(rounded(values * np.float32(preparation.rescale)) - mean) / std)


def _squares(values: NDArray[np.float32], preparation: Preparation) -> NDArray[np.float32]:
    """The patches of values f32 [3, H, W], see `patches_of`."""
    patch, side = preparation.patch, preparation.side
    rows, columns = values.shape[1] // patch // side, values.shape[2] // patch // side
    squares = values.reshape(3, rows, side, patch, columns, side, patch).transpose(1, 4, 2, 5, 0, 3, 6)
    return np.ascontiguousarray(squares).reshape(-1, 3 * patch**2)


def bicubic(count: int, size: int) -> NDArray[np.float64]:
    """The matrix that interpolates ``count`` values at ``size`` places, each between four; [size, count].

    Formula: torch's ``interpolate`` with mode bicubic, which does not average where it shrinks; a = -0.75.
    """
    places = (np.arange(size) + 0.5) * (count / size) - 0.5
    matrix = np.zeros((size, count))
    for tap in (-1, 0, 1, 2):
        at = np.floor(places) + tap
        x = np.abs(places - at)
        near = (1.25 * x - 2.25) * x**2 + 1
        far = -0.75 * (((x - 5) * x + 8) * x - 4)
        cells = np.clip(at, 0, count - 1).astype(int)
        np.add.at(matrix, (np.arange(size), cells), np.where(x <= 1, near, far))
    return matrix
