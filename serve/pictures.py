"""Pictures of a request: where they come from, and what the model's encoder takes of them."""

from __future__ import annotations

import asyncio
import binascii
import hashlib
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from llmjax.errors import InvalidRequest
from llmjax.serve.downloads import DownloadRules, download
from llmjax.serve.errors import ApiError, cut
from llmjax.serve.protocol.pictures import Picture

if TYPE_CHECKING:
    from llmjax.engine.front.images import Images
    from llmjax.media.image import PreparedImage

MOST_BYTES = 20 * 2**20  # of a picture's file
KEPT_BYTES = 256 * 2**20  # of prepared pictures that may be asked for again, as in the next turn of a conversation


@dataclass(frozen=True, kw_only=True)
class PictureRules:
    """Where pictures may come from beside the request itself.

    Attributes:
        folder: files below it may be named; None: none.
        downloads: which hosts may be asked; None: none.
        most: pictures of a request.
    """

    folder: Path | None = None
    downloads: DownloadRules | None = None
    most: int = 64


class Pictures:
    """Reads and prepares the pictures of requests, and keeps some of what it has prepared.

    Args:
        images: places them in prompts.
        prepare: decodes and prepares a file, on any thread, as `ImageProcessor.prepare` does.
        rules: where pictures may come from.
    """

    def __init__(self, images: Images, prepare: Callable[..., PreparedImage], rules: PictureRules) -> None:
        self.images = images
        self._prepare = prepare
        self._rules = rules
        self._kept: OrderedDict[bytes, PreparedImage] = (
            OrderedDict()
        )  # by what they are made of, least recently used first
        self._kept_bytes = 0
        self._lock = Lock()

    async def prepared(self, pictures: Sequence[Picture]) -> list[PreparedImage]:
        """The pictures as the encoder takes them, in order.

        Raises:
            ApiError: there are too many, or one cannot be had, is not a picture, or is too large; it names the one.
        """
        if len(pictures) > self._rules.most:
            raise ApiError(
                f"the request has {len(pictures)} images; it may have {self._rules.most} (--limit-mm-per-prompt)",
                param=pictures[self._rules.most].path,
                code="invalid_value",
            )
        several = len(pictures) > 1
        return [await asyncio.to_thread(self._prepared, picture, several) for picture in pictures]

    def _prepared(self, picture: Picture, several: bool) -> PreparedImage:
        try:
            data = self._read(picture.url)
            digest = hashlib.sha256(data).digest() + bytes([several])
            if (known := self._known(digest)) is not None:
                return known
            image = self._prepare(data, several=several)
        except InvalidRequest as error:
            raise ApiError(f"`{picture.path}`: {error}", param=picture.path, code="invalid_value") from error
        self._keep(digest, image)
        return image

    def _read(self, url: str) -> bytes:
        """The file that a URL names; raises InvalidRequest."""
        scheme = url[:5].lower()
        if scheme == "data:":
            return _of_data(url)
        if scheme == "file:":
            return self._of_file(url)
        if url[:8].lower().startswith(("http://", "https://")):
            if self._rules.downloads is None:
                raise InvalidRequest("this server downloads no images (--allowed-media-domains): send a data: URL")
            return download(url, self._rules.downloads, most=MOST_BYTES)
        raise InvalidRequest(f"{cut(url[:40])!r} is not a data:, http(s): or file: URL")

    def _of_file(self, url: str) -> bytes:
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
                data = file.read(MOST_BYTES + 1)
        except (OSError, ValueError, RuntimeError):
            raise outside from None
        return _checked(data)

    def _known(self, digest: bytes) -> PreparedImage | None:
        with self._lock:
            if (image := self._kept.get(digest)) is not None:
                self._kept.move_to_end(digest)
            return image

    def _keep(self, digest: bytes, image: PreparedImage) -> None:
        with self._lock:
            if digest in self._kept or image.patches.nbytes > KEPT_BYTES:
                return
            self._kept[digest] = image
            self._kept_bytes += image.patches.nbytes
            while self._kept_bytes > KEPT_BYTES:
                _, oldest = self._kept.popitem(last=False)
                self._kept_bytes -= oldest.patches.nbytes


def _of_data(url: str) -> bytes:
    """The content of a data: URL (RFC 2397) in base64; its type is not looked at."""
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidRequest("a data: URL must be of the form data:image/png;base64,…")
    if len(body) > MOST_BYTES * 4 // 3 + 4:
        raise InvalidRequest(f"the file has more than {MOST_BYTES >> 20} MiB")
    try:
        data = b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("the data: URL is not valid base64") from None
    return _checked(data)


def _checked(data: bytes) -> bytes:
    if not data:
        raise InvalidRequest("the file is empty")
    if len(data) > MOST_BYTES:
        raise InvalidRequest(f"the file has more than {MOST_BYTES >> 20} MiB")
    return data
