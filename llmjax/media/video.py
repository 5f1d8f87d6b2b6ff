"""Reads a video's file with PyAV, and takes the frames that a model's processor would."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from llmjax.errors import InvalidRequest
from llmjax.media.files import VIDEO_BYTES
from llmjax.models.vision.preparation import Sampling

EXTRA = "videos are decoded by PyAV, which is not installed: pip install 'llmjax[video]'"
SHORT, LONG, LONGEST = 30, 300, 2400  # seconds of videos whose frames are taken at one pace
PAIR = 2  # frames, of which both are taken
FPS_UNKNOWN = 24.0  # as transformers has it


@dataclass(frozen=True, kw_only=True)
class VideoLimits:
    """How large a video may be.

    Attributes:
        nbytes: the size of its file.
        frames: how many it may have.
        pixels: the sum of those in the frames that are taken.
        side: pixels along either side.
    """

    nbytes: int = VIDEO_BYTES
    frames: int = 200_000
    pixels: int = 500_000_000
    side: int = 8192


@dataclass(frozen=True, eq=False)
class Frames:
    """Frames of a video, in RGB and of one size.

    Attributes:
        images: those that are taken.
        indices: their numbers in the video.
        fps: how many the video has in a second.
        total: how many it has.
    """

    images: Sequence[Image.Image]
    indices: Sequence[int]
    fps: float
    total: int

    @property
    def sampled_fps(self) -> float:
        """How many of a second are taken."""
        return len(self.images) / self.total * self.fps


def sampled(total: int, fps: float, sampling: Sampling) -> list[int]:
    """The numbers of the frames that are taken; formulas: ``sample_frames`` of transformers' video processors.

    Args:
        total: frames of the video.
        fps: how many it has in a second.
    """
    if sampling.order == "seconds":
        return _by_seconds(total, fps, sampling)
    if sampling.order == "length":
        return _by_length(total, fps, sampling)
    if sampling.order == "last":
        return _with_last(total, fps, sampling)
    wished = sampling.most if sampling.fps is None else total / fps * sampling.fps
    if sampling.order == "parts":
        count = max(min(int(wished), sampling.most, total), 1)
        return [number * total // count for number in range(count)]
    if sampling.order == "ends":
        count = min(max(int(wished), sampling.least), sampling.most, total)
        return [int(index) for index in np.linspace(0, total - 1, count).round()]
    most = min(sampling.most, total) // 2 * 2
    count = math.floor(min(max(wished, sampling.least), most)) // 2 * 2
    # The product is rounded to f32 before it is cut, as torch.arange does.
    steps = (np.arange(count) * (total / max(count, 1))).astype(np.float32)
    return [min(int(index), total - 1) for index in steps] or [0]


def _by_seconds(total: int, fps: float, sampling: Sampling) -> list[int]:
    assert sampling.fps is not None
    last, seconds = total - 1, total / fps
    if seconds <= sampling.most / sampling.fps:
        count = max(math.floor(seconds * sampling.fps), 1)
        found = [min(last, math.ceil(number * fps / sampling.fps)) for number in range(count)]
    elif sampling.most >= total:
        found = list(range(total))
    else:
        found = [min(last, math.ceil(at * fps)) for at in np.linspace(0, seconds, sampling.most)]
    found = list(dict.fromkeys(found))
    return [*found, found[-1]] if len(found) % 2 else found


def _with_last(total: int, fps: float, sampling: Sampling) -> list[int]:
    """Formula: ``uniform_last_frame`` of the code that Molmo 2's checkpoints came with."""
    assert sampling.fps is not None
    if total <= PAIR:
        return list(range(total))
    if total / fps > (sampling.most - 1) / sampling.fps:
        return [int(index) for index in np.linspace(0, total - 1, min(sampling.most, total))]
    found = [int(index) for index in np.arange(0.0, total - 1, fps / sampling.fps).round()]
    return found if found[-1] == total - 1 else [*found, total - 1]


def _by_length(total: int, fps: float, sampling: Sampling) -> list[int]:
    assert sampling.fps is not None
    duration = total / fps
    length = min(duration, LONGEST)
    pace = sampling.fps * (3 if length <= SHORT else 1 if length <= LONG else 0.5)
    count, found, moment = min(int(length * pace), sampling.most), [], 0.0
    for index in range(total) if total >= count else ():
        if index * (1 / fps) >= moment:
            moment += 1 / pace
            found.append(index)
            if moment >= int(duration):
                break
    if len(found) != count:
        ends = (found[0], found[-1]) if 0 < len(found) < count else (0, total - 1)
        found = np.linspace(*ends, count, dtype=int).tolist()
    found = list(dict.fromkeys(found))
    return [*found, found[-1]] if len(found) % 2 else found


def decoded_video(data: bytes, limits: VideoLimits, sampling: Sampling) -> Frames:
    """The frames of a file that a processor takes.

    Raises:
        InvalidRequest: PyAV is not installed; or the file is too large, no video that PyAV reads, or damaged.
    """
    try:
        import av
    except ImportError:
        raise InvalidRequest(EXTRA) from None
    if len(data) > limits.nbytes:
        raise InvalidRequest(f"the video has {len(data)} bytes, more than {limits.nbytes}")
    try:
        with av.open(io.BytesIO(data), mode="r") as container:
            if not container.streams.video:
                raise InvalidRequest("the file has no video")
            stream = container.streams.video[0]
            width, height = stream.codec_context.width, stream.codec_context.height
            if not 0 < width <= limits.side or not 0 < height <= limits.side:
                raise InvalidRequest(f"the video is {width} x {height} pixels; a side may have {limits.side}")
            total, fps = stream.frames or _counted(container, stream), float(stream.average_rate or FPS_UNKNOWN)
            if not 0 < total <= limits.frames:
                raise InvalidRequest(f"the video has {total} frames; it may have from 1 to {limits.frames}")
            if not 0 < fps < math.inf:
                raise InvalidRequest(f"the video has {fps} frames in a second")
            indices = sampled(total, fps, sampling)
            if (pixels := len(indices) * width * height) > limits.pixels:
                raise InvalidRequest(
                    f"{len(indices)} frames of {width} x {height} pixels would be taken of the video, which are "
                    f"{pixels} pixels; there may be {limits.pixels}: make it shorter or smaller"
                )
            found = _taken(container, stream, frozenset(indices))
    except av.FFmpegError as error:
        raise InvalidRequest(f"the video cannot be decoded ({type(error).__name__})") from None
    if not found:
        raise InvalidRequest("the video has no frames that can be decoded")
    # A file may tell of more frames than it has: the last one stands for those.
    return Frames([found.get(index, found[max(found)]) for index in indices], indices, fps, total)


def _counted(container: Any, stream: Any) -> int:
    """The frames of a file that does not say how many it has."""
    count = sum(1 for packet in container.demux(stream) if packet.size)
    container.seek(0)
    return count


def _taken(container: Any, stream: Any, wanted: frozenset[int]) -> dict[int, Image.Image]:
    """Frames by their numbers, those wanted and the last one before a wanted one that is not there."""
    found: dict[int, Image.Image] = {}
    last, frame, number = max(wanted), None, -1
    for number, frame in enumerate(container.decode(stream)):
        if number in wanted:
            found[number] = Image.fromarray(frame.to_ndarray(format="rgb24"))
        if number >= last:
            break
    if frame is not None and number < last:
        found[number] = Image.fromarray(frame.to_ndarray(format="rgb24"))
    return found


def frames_of(given: Any) -> Frames:
    """The frames of a video that a caller has, of which none is left out.

    Args:
        given: u8 [T, H, W, 3], or a list of arrays u8 [H, W, 3] or images of Pillow; or a pair of that and vLLM's
            metadata: ``fps`` of the video that they are from, their ``frames_indices`` in it, and its
            ``total_num_frames``.

    Raises:
        InvalidRequest: they are something else, or differ in size.
    """
    known: Mapping[str, Any] = {}
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        given, known = given
    if not isinstance(given, list | tuple | np.ndarray):
        raise InvalidRequest(f"a {type(given).__name__} is not a video: give a path, bytes, or a list of frames")
    images = [_frame(each) for each in given]
    if not images:
        raise InvalidRequest("the video has no frames")
    if len({image.size for image in images}) > 1:
        raise InvalidRequest("the frames of a video must be of one size")
    fps, indices = known.get("fps") or FPS_UNKNOWN, known.get("frames_indices")
    indices = list(range(len(images))) if indices is None else [int(index) for index in indices]
    if not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise InvalidRequest("the fps of a video must be a positive number")
    if len(indices) != len(images):
        raise InvalidRequest(f"there are {len(images)} frames and {len(indices)} frames_indices")
    return Frames(images, indices, float(fps), int(known.get("total_num_frames") or max(indices) + 1))


def _frame(given: Any) -> Image.Image:
    if isinstance(given, Image.Image):
        return given.convert("RGB")
    array: NDArray[Any] = np.asarray(given)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] != 3 or not array.size:
        raise InvalidRequest("a frame must be an image of Pillow, or an array of bytes [height, width, 3]")
    return Image.fromarray(array)
