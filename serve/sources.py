"""Files of requests: in the request itself, or named by it."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Generic, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from llmjax.base64_text import from_base64
from llmjax.errors import InvalidRequest
from llmjax.serve.downloads import DownloadRules, download
from llmjax.serve.errors import ApiError, cut
from llmjax.serve.files import FileStore
from llmjax.serve.protocol.pictures import Attachment, Kind

MOST_BYTES: Mapping[Kind, int] = {"image": 20 * 2**20, "video": 100 * 2**20, "file": 20 * 2**20}  # of a file
KEPT_BYTES = 256 * 2**20  # of what may be asked for again, as in the next turn of a conversation
MOST_KEPT = 4096


class Sized(Protocol):
    """What has a size in bytes."""

    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


class Kept(Generic[T]):
    """What has been made or sent, by a digest of what says which; the least recently used ones go. Thread-safe."""

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
        """Keeps one, unless it is larger than what is kept in all, in place of the one with its digest."""
        with self._lock:
            if (old := self._all.pop(digest, None)) is not None:
                self._bytes -= old.nbytes
            if made.nbytes > KEPT_BYTES:
                return
            self._all[digest] = made
            self._bytes += made.nbytes
            while self._bytes > KEPT_BYTES or len(self._all) > MOST_KEPT:
                _, oldest = self._all.popitem(last=False)
                self._bytes -= oldest.nbytes


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Reads the files that requests have or name.

    Attributes:
        files: what clients have uploaded.
        folder: files below it may be named; None: none.
        downloads: which hosts may be asked; None: none.
    """

    files: FileStore
    folder: Path | None = None
    downloads: DownloadRules | None = None
    _named: Kept[memoryview] = field(default_factory=Kept)  # by owner, kind and uuid

    async def read(self, asked: Attachment, *, owner: str) -> bytes:
        """The content of a file. One that comes with a uuid can be had by that alone later, by the same owner.

        Args:
            owner: the API key that asks, as ``owner_of`` has it.

        Raises:
            ApiError: it cannot be had, is empty or too large; it names the part.
        """
        uploaded = None
        if asked.file_id is not None:
            uploaded = self.files.path(self.files.get(owner, asked.file_id, field=asked.path))
        try:
            return await asyncio.to_thread(self._read, asked, owner, uploaded)
        except InvalidRequest as error:
            raise ApiError(f"`{asked.path}`: {error}", param=asked.path, code="invalid_value") from error

    def _read(self, asked: Attachment, owner: str, uploaded: Path | None) -> bytes:
        name = hashlib.sha256(repr((owner, asked.kind, asked.uuid)).encode()).digest()
        if uploaded is None and asked.url is None:
            if (known := self._named.get(name)) is None:
                raise InvalidRequest(
                    f"no {asked.kind} with the uuid {cut(asked.uuid or '')!r} is kept that this API key has sent: send "
                    "it again"
                )
            return bytes(known)
        most = MOST_BYTES[asked.kind]
        data = self._of_url(asked.url or "", most) if uploaded is None else _of_path(uploaded, most)
        if asked.uuid is not None:
            self._named.put(name, memoryview(data))
        return data

    def _of_url(self, url: str, most: int) -> bytes:
        """The file of up to ``most`` bytes that a URL names; raises InvalidRequest."""
        scheme = url[:5].lower()
        if scheme == "data:":
            return _of_data(url, most)
        if scheme == "file:":
            return self._of_file(url, most)
        if url[:8].lower().startswith(("http://", "https://")):
            if self.downloads is None:
                raise InvalidRequest("this server downloads no images (--allowed-media-domains): send a data: URL")
            return download(url, self.downloads, most=most)
        raise InvalidRequest(f"{cut(url[:40])!r} is not a data:, http(s): or file: URL")

    def _of_file(self, url: str, most: int) -> bytes:
        folder, parts = self.folder, urlsplit(url)
        if folder is None:
            raise InvalidRequest("this server reads no files (--allowed-local-media-path): send a data: URL")
        if parts.netloc not in ("", "localhost"):
            raise InvalidRequest("a file: URL has the path of a file on this machine, and no host")
        outside = InvalidRequest("there is no such file below the folder of --allowed-local-media-path")
        try:
            path, below = Path(unquote(parts.path)).resolve(strict=True), folder.resolve(strict=True)
            if not path.is_relative_to(below) or not path.is_file():
                raise outside
            return _of_path(path, most)
        except (OSError, ValueError, RuntimeError):
            raise outside from None


def _of_path(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        return _checked(file.read(most + 1), most)


def _of_data(url: str, most: int) -> bytes:
    """The content of a data: URL (RFC 2397) in base64; its type is not looked at."""
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidRequest("a data: URL must be of the form data:image/png;base64,…")
    if len(body) > most * 3 // 2:  # with ends of lines; what is left is looked at below
        raise InvalidRequest(f"the file has more than {most >> 20} MiB")
    try:
        data = from_base64(body)
    except ValueError:
        raise InvalidRequest("the data: URL is not valid base64") from None
    return _checked(data, most)


def _checked(data: bytes, most: int) -> bytes:
    if not data:
        raise InvalidRequest("the file is empty")
    if len(data) > most:
        raise InvalidRequest(f"the file has more than {most >> 20} MiB")
    return data
