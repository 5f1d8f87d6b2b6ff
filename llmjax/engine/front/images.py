"""Prompts with images and videos: both are prepared, placed among the tokens, and checked against what the engine
takes."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmjax.engine.core.media import PromptImage, PromptMedia, Whole
from llmjax.engine.front.named_media import NamedMedia, names_of
from llmjax.engine.info import VisionInfo
from llmjax.errors import InvalidRequest
from llmjax.media.files import IMAGE_BYTES, VIDEO_BYTES, file_content
from llmjax.media.image import PreparedImage, PreparedVideo
from llmjax.media.prompt import MediaPrompt, mrope_positions, with_images, with_videos

if TYPE_CHECKING:
    from llmjax.media.loading import ProcessorSource
    from llmjax.media.processor import ImageProcessor

TEXT_ONLY = "this model reads text only; one that sees is, for example, Qwen/Qwen2.5-VL-3B-Instruct"

PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})  # modes of Pillow that PNG keeps as they are


class Images:
    """Makes prompts with images.

    Args:
        processor: prepares pictures for the model's encoder.
        info: what the engine takes.
        tokenize: text to ids, for the texts in videos.
        placeholder, video_placeholder: the text that stands for an image in a prompt, and for a video.
        page: the prompt of a picture that is given alone; empty: there is none.
        limit, video_limit: most images and most videos of a prompt.
        special: ids that a tokenizer puts around texts.
        source: makes processors that have other keywords; None: there are none.

    Attributes:
        keywords: a digest of those that a request has brought; empty: it has brought none.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        info: VisionInfo,
        *,
        tokenize: Callable[[str], list[int]],
        placeholder: str = "",
        video_placeholder: str = "",
        page: str = "",
        limit: int | None = None,
        video_limit: int | None = None,
        special: Collection[int] = (),
        source: ProcessorSource | None = None,
    ) -> None:
        self.processor = processor
        self.placeholder, self.video_placeholder, self.page = placeholder, video_placeholder, page
        self.limit, self.video_limit = limit, video_limit
        self.keywords = b""
        self._source, self._special = source, special
        self._named = NamedMedia()
        self._tokenize = tokenize
        self._info = info

    @classmethod
    def of(
        cls,
        path: Path,
        info: VisionInfo,
        *,
        tokenize: Callable[[str], list[int]],
        detokenize: Callable[[list[int]], str],
        limit: int | None = None,
        video_limit: int | None = None,
        special: Collection[int] = (),
        mmproj: str | None = None,
        keywords: Mapping[str, Any] | None = None,
    ) -> Images | None:
        """The `Images` of a model; None: its files do not say how pictures are prepared.

        Args:
            path: its folder, or its .gguf file.
            mmproj: the file of the latter's encoder; None: the one beside it.
            keywords: vLLM's ``mm_processor_kwargs``, for requests that bring none of the same name.

        Raises:
            InvalidRequest: a keyword is unknown or wrong.
        """
        from llmjax.checkpoint.mistral_layout import config_in  # which reads checkpoints, with JAX
        from llmjax.media.loading import source_beside, source_in

        if path.is_dir():
            source = source_in(path, config_in(path), tokenize)
        else:
            beside = source_beside(path, tokenize, mmproj=None if mmproj is None else Path(mmproj))
            if beside is None:
                return None
            source = beside
        source = source.with_keywords(keywords) if keywords else source
        processor = source.processor()
        if processor is None:
            return None
        return cls(
            processor,
            info,
            tokenize=tokenize,
            placeholder=detokenize(list(processor.placeholder)),
            video_placeholder=detokenize(list(processor.video_placeholder)),
            page=detokenize(list(processor.page)),
            limit=limit,
            video_limit=video_limit,
            special=special,
            source=source,
        )

    def with_keywords(self, keywords: Mapping[str, Any] | None) -> Images:
        """The same with other settings of the processor, vLLM's ``mm_processor_kwargs``.

        Raises:
            InvalidRequest: a keyword is unknown or wrong.
        """
        if not keywords:
            return self
        if not isinstance(keywords, Mapping):
            raise InvalidRequest("mm_processor_kwargs must be an object", field="mm_processor_kwargs")
        processor = None if self._source is None else self._source.with_keywords(keywords).processor()
        if processor is None:
            raise InvalidRequest("mm_processor_kwargs: this model's processor has none", field="mm_processor_kwargs")
        found = copy(self)
        found.processor = processor
        found.keywords = hashlib.sha256(json.dumps(keywords, sort_keys=True).encode()).digest()
        return found

    def prepared(self, pictures: Any, uuids: Any = None) -> list[PreparedImage]:
        """Prepared images of one picture or several: of files, their bytes, or images of Pillow.

        Args:
            uuids: vLLM's ``multi_modal_uuids``: names by which later prompts have them without giving them again.

        Raises:
            InvalidRequest: one is none of these, cannot be read, or is too large; or there are too many.
        """
        several = pictures if isinstance(pictures, list | tuple) else [pictures]
        self.check_count(len(several))
        found, many = [], len(several) > self.processor.alone
        prepare = partial(self._prepared, several=many)
        for number, (picture, name) in enumerate(zip(several, names_of(uuids, "image", len(several)), strict=True)):
            try:
                key = ("image", name, many, self.keywords)
                image = prepare(picture) if name is None else self._named.get(key, picture, prepare)
            except InvalidRequest as error:
                raise InvalidRequest(f"image {number + 1}: {error}", field="multi_modal_data") from error
            found.append(image)
        return found

    def _prepared(self, picture: Any, *, several: bool) -> PreparedImage:
        if isinstance(picture, PreparedImage):
            return picture
        return self.processor.prepare(bytes_of(picture, most=IMAGE_BYTES), several=several)

    def prepared_videos(self, videos: Any, uuids: Any = None) -> list[PreparedVideo]:
        """Prepared videos of one video or several: of files, their bytes, or what `frames_of` takes.

        Args:
            uuids: as those of `prepared`.

        Raises:
            InvalidRequest: one is none of these, cannot be read, or is too large; or there are too many.
        """
        several = videos if isinstance(videos, list) and not (videos and _is_frame(videos[0])) else [videos]
        self.check_video_count(len(several))
        found = []
        for number, (video, name) in enumerate(zip(several, names_of(uuids, "video", len(several)), strict=True)):
            try:
                key = ("video", name, self.keywords)
                own = self._prepared_video(video) if name is None else self._named.get(key, video, self._prepared_video)
                found.append(own)
            except InvalidRequest as error:
                raise InvalidRequest(f"video {number + 1}: {error}", field="multi_modal_data") from error
        return found

    def _prepared_video(self, video: Any) -> PreparedVideo:
        from llmjax.media.video import frames_of  # with Pillow

        file = isinstance(video, str | Path | bytes | bytearray | memoryview)
        return self.processor.prepare_video(bytes_of(video, most=VIDEO_BYTES) if file else frames_of(video))

    def check_count(self, count: int) -> None:
        """Raises InvalidRequest if a prompt may have fewer images."""
        _check_count(count, "images", self.limit)

    def check_video_count(self, count: int) -> None:
        """Raises InvalidRequest if a prompt may have fewer videos."""
        _check_count(count, "videos", self.video_limit)

    def check_size(self, number: int, image: PreparedImage) -> None:
        """Raises InvalidRequest if there is no room for an image: in the pool, or in a step if it must be in one."""
        tokens, info = len(image.tokens), self._info
        if info.whole == "image":  # of one with crops each group of rows is in a step of its own
            token = self.processor.row_token_id if image.row_token is None else image.row_token
            tokens = max((len(list(run)) for is_row, run in groupby(image.tokens, token.__eq__) if is_row), default=0)
        if image.num_rows > info.max_rows:
            raise InvalidRequest(
                f"image {number + 1} has {image.num_rows} feature rows; there is room for {info.max_rows}: make it "
                "smaller",
                field="multi_modal_data",
            )
        if tokens > info.max_tokens:
            raise InvalidRequest(
                f"image {number + 1} has {tokens} tokens that must be in one step; a step has room for "
                f"{info.max_tokens} of them (--max-num-batched-tokens)",
                field="multi_modal_data",
            )

    def placed(
        self, ids: list[int], images: Sequence[PreparedImage], videos: Sequence[PreparedVideo] = ()
    ) -> tuple[list[int], PromptMedia | None]:
        """The tokens of a prompt with those of its images and videos in place of the placeholders, and the images.

        Raises:
            InvalidRequest: there are more or fewer placeholders than images or videos, or one is too large.
        """
        processor, info = self.processor, self._info
        if ids[: len(processor.first)] != list(processor.first):
            ids = [*processor.first, *ids]
        if processor.sole and not processor.needed <= len(images) <= 1:
            raise InvalidRequest(
                f"a prompt of this model has one image, at its start; there are {len(images)}", field="multi_modal_data"
            )
        if processor.single and images:
            ids = self._alone(ids, len(images))
        if processor.page and len(images) == 1 and self._nothing_beside(ids):
            ids = list(processor.page)
        if not images and not videos and not {*processor.placeholder[:1], *processor.video_placeholder[:1]} & set(ids):
            return ids, None
        if processor.video_placeholder:
            ids, images = with_videos(
                ids,
                images,
                videos,
                placeholder=processor.placeholder,
                video_placeholder=processor.video_placeholder,
                texts=self._texts,
            )
        for number, image in enumerate(images):
            self.check_size(number, image)
        prompt = with_images(
            ids,
            images,
            placeholder=processor.placeholder,
            line_breaks=processor.line_breaks,
            counted=processor.counted,
            frame=processor.frame,
            fence=processor.fence,
        )
        if processor.sole and prompt.spans and prompt.spans[0].start:
            raise InvalidRequest("the image must be at the start of the prompt, before its text", field="prompt")
        if not images:
            return ids, None
        axes, delta = None, 0
        if info.axes:
            axes, delta = mrope_positions(prompt, images, row_token=processor.row_token_id, merge=info.side)
        found = tuple(_placed(prompt, number, images, processor.row_token_ids) for number in range(len(prompt.spans)))
        return list(prompt.ids), PromptMedia(images=found, axes=axes, delta=delta, wholes=_wholes(prompt, found, info))

    def _alone(self, ids: list[int], count: int) -> list[int]:
        """A prompt of one picture, in which nothing is beside the placeholder, nor need that be there itself.

        Raises:
            InvalidRequest: there are more pictures, or there is text.
        """
        placeholder = list(self.processor.placeholder)
        if count > 1:
            raise InvalidRequest(
                f"this model makes a vector of one picture; there are {count}: give each a prompt of its own",
                field="multi_modal_data",
            )
        if not self._nothing_beside(ids):
            raise InvalidRequest(
                "this model makes a vector of a picture or of a text: give each a prompt of its own", field="prompt"
            )
        return placeholder

    def _nothing_beside(self, ids: Sequence[int]) -> bool:
        """Whether a prompt has no tokens beside a placeholder, but for those that a tokenizer puts around texts."""
        own = list(self.processor.placeholder)
        return ids == own or [token for token in ids if token not in self._special] in ([], own)

    def _texts(self, times: Sequence[float], first: bool) -> tuple[list[int], list[int]]:
        before, after = self.processor.frame_texts(times, first=first)
        return self._tokenize(before) if before else [], self._tokenize(after) if after else []


def media_of(data: Mapping[str, Any]) -> tuple[Any, Any]:
    """The pictures and the videos in vLLM's ``multi_modal_data``; raises InvalidRequest if there is anything else."""
    if other := next((key for key in data if key not in ("image", "video")), None):
        raise InvalidRequest(
            f"multi_modal_data: {other!r} is not supported, only 'image' and 'video'", field="multi_modal_data"
        )
    return data.get("image", []), data.get("video", [])


def _is_frame(given: Any) -> bool:
    return hasattr(given, "save") or (isinstance(given, np.ndarray) and given.ndim == 3)


def _check_count(count: int, what: str, limit: int | None) -> None:
    if limit is not None and count > limit:
        raise InvalidRequest(
            f"there are {count} {what}; a prompt may have {limit} (--limit-mm-per-prompt)", field="multi_modal_data"
        )


def _placed(
    prompt: MediaPrompt, number: int, images: Sequence[PreparedImage], row_tokens: Sequence[int]
) -> PromptImage:
    span = prompt.spans[number]
    image, end = images[span.image_index], span.start + span.length
    tokens = row_tokens if image.row_token is None else [image.row_token]
    rows = span.start + np.flatnonzero(np.isin(prompt.ids[span.start : end], tokens))
    if len(rows) != image.num_rows:
        raise InvalidRequest(f"image {number + 1} has {image.num_rows} feature rows, and room for {len(rows)}")
    return PromptImage(start=span.start, end=end, rows=rows.astype(np.int32), image=image)


def _wholes(prompt: MediaPrompt, images: Sequence[PromptImage], info: VisionInfo) -> tuple[Whole, ...]:
    """The tokens of a prompt that see one another.

    Raises:
        InvalidRequest: they are all of the prompt, or of its images, and more than a step has room for.
    """
    if info.whole is None:
        return ()
    if info.whole == "text":
        return tuple(Whole(one.start, one.end) for one in images)
    if info.whole == "image":
        runs = (run for one in images for run in np.split(one.rows, np.flatnonzero(np.diff(one.rows) > 1) + 1))
        return tuple(Whole(int(run[0]), int(run[-1]) + 1) for run in runs)
    start, end, tokens = 0, len(prompt.ids), None
    if info.whole == "images":
        start, end = images[0].start, images[-1].end
        tokens = np.concatenate([np.arange(one.start, one.end, dtype=np.int32) for one in images])
    if (count := end - start) > info.max_tokens:
        raise InvalidRequest(
            f"the prompt has {count} tokens with its images that must be in one step; a step has room for "
            f"{info.max_tokens} of them (--max-num-batched-tokens)",
            field="multi_modal_data",
        )
    if (num_rows := sum(one.image.num_rows for one in images)) > info.max_rows:
        raise InvalidRequest(
            f"the images have {num_rows} feature rows, which must be there in one step; there is room for "
            f"{info.max_rows}: take fewer, or make them smaller",
            field="multi_modal_data",
        )
    seen = np.array(prompt.ids[start:end], np.int32).tobytes() + b"".join(one.image.digest for one in images)
    return (Whole(start, end, hashlib.sha256(seen).digest(), tokens),)


def bytes_of(picture: Any, *, most: int) -> bytes:
    """The content of a picture's file, or one that holds an image of Pillow, which is turned as its file says.

    Args:
        most: bytes that a file may have.

    Raises:
        InvalidRequest: it is not a picture, or its file cannot be read or is larger.
    """
    match picture:
        case bytes() | bytearray() | memoryview():
            return bytes(picture)
        case str() | Path():
            return file_content(picture, most=most)
    if hasattr(picture, "save") and hasattr(picture, "mode"):  # one of Pillow
        from PIL.Image import Exif

        from llmjax.media.decoding import ORIENTATION

        exif, turned = Exif(), picture.getexif().get(ORIENTATION)
        if turned in range(2, 9):
            exif[ORIENTATION] = turned
        mode = "RGBA" if "A" in picture.getbands() else "RGB"
        file = io.BytesIO()
        (picture if picture.mode in PNG_MODES else picture.convert(mode)).save(file, format="PNG", exif=exif)
        return file.getvalue()
    raise InvalidRequest(f"a {type(picture).__name__} is not a picture: give a path, bytes or an image of Pillow")
