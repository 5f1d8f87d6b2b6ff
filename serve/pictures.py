"""Pictures and videos of a request, as the model's encoder takes them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from llmjax.errors import InvalidRequest
from llmjax.serve.errors import ApiError
from llmjax.serve.protocol.pictures import Attachment, Kind
from llmjax.serve.sources import Kept, Sources, T

if TYPE_CHECKING:
    from llmjax.engine.front.images import Images
    from llmjax.media.image import PreparedImage, PreparedVideo


@dataclass(frozen=True, kw_only=True)
class PictureRules:
    """How many pictures a request may have.

    Attributes:
        most, most_videos: pictures and videos.
        most_tokens: their tokens together, those of the context.
    """

    most: int = 64
    most_videos: int = 4
    most_tokens: int


class Pictures:
    """Reads and prepares the pictures of requests, and keeps some of what it has prepared.

    Args:
        images: places them in prompts.
        prepare: decodes and prepares a picture's file, on any thread, as `PicturePool.prepare` does.
        prepare_video: the same of a video.
        sources: reads files.
        rules: how many there may be.
    """

    def __init__(
        self,
        images: Images,
        prepare: Callable[..., PreparedImage],
        prepare_video: Callable[..., PreparedVideo],
        *,
        sources: Sources,
        rules: PictureRules,
    ) -> None:
        self.images = images
        self._prepare, self._prepare_video = prepare, prepare_video
        self._sources, self._rules = sources, rules
        self._images: Kept[PreparedImage] = Kept()
        self._videos: Kept[PreparedVideo] = Kept()

    async def prepared(
        self, pictures: Sequence[Attachment], *, images: Images, owner: str
    ) -> tuple[list[PreparedImage], list[PreparedVideo]]:
        """The pictures and the videos as the encoder takes them, both in order.

        Args:
            images: what ``images`` has made of the request's keywords.
            owner: the request's API key, as ``owner_of`` has it.

        Raises:
            ApiError: there are too many, or one cannot be had, is not a picture, or is too large; it names the one.
        """
        limits: tuple[tuple[Kind, int], ...] = (("image", self._rules.most), ("video", self._rules.most_videos))
        for kind, most in limits:
            of_kind = [picture for picture in pictures if picture.kind == kind]
            if len(of_kind) > most:
                raise ApiError(
                    f"the request has {len(of_kind)} {kind}s; it may have {most} (--limit-mm-per-prompt)",
                    param=of_kind[most].path,
                    code="invalid_value",
                )
        # Those of the model's own settings are prepared by the processor that the pool's processes have.
        other = None if images is self.images else images.processor
        several = sum(picture.kind == "image" for picture in pictures) > images.processor.alone
        found: list[PreparedImage] = []
        videos: list[PreparedVideo] = []
        left = self._rules.most_tokens
        for picture in pictures:
            data = await self._sources.read(picture, owner=owner)
            if picture.kind == "image":
                key = images.keywords + bytes([several])
                make_image = partial(self._prepare, several=several, processor=other)
                image = await asyncio.to_thread(self._made, picture, data, key, self._images, make_image)
                found.append(image)
                parts = [image]
            else:
                make_video = partial(self._prepare_video, processor=other)
                video = await asyncio.to_thread(self._made, picture, data, images.keywords, self._videos, make_video)
                videos.append(video)
                parts = [*video.pictures]
            left -= sum(len(part.tokens) for part in parts)
            if left < 0:
                raise ApiError(
                    f"`{picture.path}`: with it the pictures have more tokens than the context of "
                    f"{self._rules.most_tokens}",
                    param=picture.path,
                    code="context_length_exceeded",
                )
        return found, videos

    def _made(
        self, picture: Attachment, data: bytes, settings: bytes, kept: Kept[T], prepare: Callable[[bytes], T]
    ) -> T:
        digest = hashlib.sha256(data).digest() + settings
        if (known := kept.get(digest)) is not None:
            return known
        try:
            made = prepare(data)
        except InvalidRequest as error:
            raise ApiError(f"`{picture.path}`: {error}", param=picture.path, code="invalid_value") from error
        kept.put(digest, made)
        return made
