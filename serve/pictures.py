"""Pictures and videos of a request: where they come from, and what the model's encoder takes of them."""

from __future__ import annotations

import asyncio
import binascii
import hashlib
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from llmjax.errors import InvalidRequest
from llmjax.serve.downloads import DownloadRules, download
from llmjax.serve.errors import ApiError, cut
from llmjax.serve.protocol.pictures import Kind, Picture

if TYPE_CHECKING:
    from llmjax.engine.front.images import Images
    from llmjax.media.image import PreparedImage, PreparedVideo

MOST_BYTES: Mapping[Kind, int] = {"image": 20 * 2**20, "video": 100 * 2**20}  # of a file
KEPT_BYTES = 256 * 2**20  # of prepared pictures that may be asked for again, as in the next turn of a conversation


@dataclass(frozen=True, kw_only=True)
class PictureRules:
    """Where pictures may come from beside the request itself.

    Attributes:
        folder: files below it may be named; None: none.
        downloads: which hosts may be asked; None: none.
        most, most_videos: pictures and videos of a request.
    """

    folder: Path | None = None
    downloads: DownloadRules | None = None
    most: int = 64
    most_videos: int = 4


class Sized(Protocol):
    """What has a size in bytes."""

    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


class Kept(Generic[T]):
    """Prepared pictures or videos by what they are made of; the least recently used ones go. Thread-safe."""

    def __init__(self) -> None:
        self._all: OrderedDict[bytes, T] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def get(self, digest: bytes) -> T | None:
        """One that is kept."""
        with self._lock:
            if (found := self._all.get(digest)) is not None:
                self._all.move_to_end(digest)
            return found

    def put(self, digest: bytes, made: T) -> None:
        """Keeps one, unless it is larger than what is kept in all."""
        with self._lock:
            if digest in self._all or made.nbytes > KEPT_BYTES:
                return
            self._all[digest] = made
            self._bytes += made.nbytes
            while self._bytes > KEPT_BYTES:
                _, oldest = self._all.popitem(last=False)
                self._bytes -= oldest.nbytes


class Pictures:
    """Reads and prepares the pictures of requests, and keeps some of what it has prepared.

    Args:
        images: places them in prompts.
        prepare: decodes and prepares a picture's file, on any thread, as `ImageProcessor.prepare` does.
        prepare_video: the same of a video.
        rules: where pictures may come from.
    """

    def __init__(
        self,
        images: Images,
        prepare: Callable[..., PreparedImage],
        prepare_video: Callable[[bytes], PreparedVideo],
        rules: PictureRules,
    ) -> None:
        self.images = images
        self._prepare, self._prepare_video = prepare, prepare_video
        self._rules = rules
        self._images: Kept[PreparedImage] = Kept()
        self._videos: Kept[PreparedVideo] = Kept()

    async def prepared(self, pictures: Sequence[Picture]) -> tuple[list[PreparedImage], list[PreparedVideo]]:
        """The pictures and the videos as the encoder takes them, both in order.

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
        several = sum(picture.kind == "image" for picture in pictures) > 1
        images, videos = [], []
        for picture in pictures:
            if picture.kind == "image":
                images.append(await asyncio.to_thread(self._image, picture, several))
            else:
                videos.append(await asyncio.to_thread(self._video, picture))
        return images, videos

    def _image(self, picture: Picture, several: bool) -> PreparedImage:
        return self._made(picture, self._images, bytes([several]), partial(self._prepare, several=several))

    def _video(self, picture: Picture) -> PreparedVideo:
        return self._made(picture, self._videos, b"", self._prepare_video)

    def _made(self, picture: Picture, kept: Kept[T], settings: bytes, prepare: Callable[[bytes], T]) -> T:
        try:
            data = self._read(picture.url, MOST_BYTES[picture.kind])
            digest = hashlib.sha256(data).digest() + settings
            if (known := kept.get(digest)) is not None:
                return known
            made = prepare(data)
        except InvalidRequest as error:
            raise ApiError(f"`{picture.path}`: {error}", param=picture.path, code="invalid_value") from error
        kept.put(digest, made)
        return made

    def _read(self, url: str, most: int) -> bytes:
        """The file of up to ``most`` bytes that a URL names; raises InvalidRequest."""
        scheme = url[:5].lower()
        if scheme == "data:":
            return _of_data(url, most)
        if scheme == "file:":
            return self._of_file(url, most)
        if url[:8].lower().startswith(("http://", "https://")):
            if self._rules.downloads is None:
                raise InvalidRequest("this server downloads no images (--allowed-media-domains): send a data: URL")
            return download(url, self._rules.downloads, most=most)
        raise InvalidRequest(f"{cut(url[:40])!r} is not a data:, http(s): or file: URL")

    def _of_file(self, url: str, most: int) -> bytes:
        folder, parts = self._rules.folder, urlsplit(url)
        if folder is None:
            raise InvalidRequest("this server reads no files (--allowed-local-media-path): send a data: URL")
        if parts.netloc not in ("", "localhost"):
            raise InvalidRequest("a file: URL has the path of a file on this machine, and no host")
        outside = InvalidRequest("there is no such file below the folder of --allowed-local-media-path")
        try:
            path, below = Path(unquote(parts.path)).resolve(strict=True), folder.resolve(strict=True)
            if not path.is_relative_to(below) or not path.is_file():
                raise outside
            with path.open("rb") as file:
                data = file.read(most + 1)
        except (OSError, ValueError, RuntimeError):
            raise outside from None
        return _checked(data, most)


def _of_data(url: str, most: int) -> bytes:
    """The content of a data: URL (RFC 2397) in base64; its type is not looked at."""
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidRequest("a data: URL must be of the form data:image/png;base64,…")
    if len(body) > most * 4 // 3 + 4:
        raise InvalidRequest(f"the file has more than {most >> 20} MiB")
    try:
        data = b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("the data: URL is not valid base64") from None
    return _checked(data, most)


def _checked(data: bytes, most: int) -> bytes:
    if not data:
        raise InvalidRequest("the file is empty")
    if len(data) > most:
        raise InvalidRequest(f"the file has more than {most >> 20} MiB")
    return data
