"""Files that clients leave on the server: in a bounded folder, each for the key that brought it."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from llmjax.errors import ConfigError
from llmjax.serve.errors import ApiError, cut
from llmjax.serve.records import RECORD, Records, new_draft

log = logging.getLogger("serve")

MOST_FILES = 1000  # of one owner

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """What is known of a file; times in seconds since 1970."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int

    __pydantic_config__ = RECORD

    def body(self) -> dict[str, Any]:
        """OpenAI's ``FileObject``."""
        fields = {name: value for name, value in asdict(self).items() if name != "owner"}
        return {**fields, "object": "file", "status": "processed"}


class FileStore:
    """Files in a folder, and beside each what is known of it, as JSON: a later server finds them again.

    Args:
        folder: None: a temporary one, which goes with the server.
        most_bytes: how much the files of one owner may take.
        lifetime: seconds that a file is kept.
        clock: seconds since 1970.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(
        self, folder: Path | None, *, most_bytes: int, lifetime: float, clock: Callable[[], float] = time.time
    ) -> None:
        self.most_bytes = most_bytes
        self.lifetime = lifetime
        self._clock = clock
        self._temporary = None
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="llmjax-files-")
            folder = Path(self._temporary.name)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"files_dir {folder}: {error.strerror}") from None
        self._folder = folder
        for path in folder.glob("new-*"):  # that a server which was killed has not finished
            path.unlink(missing_ok=True)
        self._records = Records(folder, StoredFile, names="file-*")
        self._charged: list[Records[Any]] = []
        self._files = {file.id: file for file in self._records.load()}
        for file in [file for file in self._files.values() if not self.path(file).exists()]:
            log.warning("files_dir: the content of %s is gone, so its record is dropped", file.id)
            self.delete(file)

    @property
    def folder(self) -> Path:
        return self._folder

    def new_path(self) -> Path:
        """Where a file may be written before it is kept."""
        return new_draft(self._folder)

    def charge(self, records: Records[Any]) -> None:
        """Has records of another kind count as their owners' files do."""
        self._charged.append(records)

    def room(self, owner: str) -> int:
        """Bytes that an owner may still leave here."""
        self._drop_expired()
        taken = sum(file.bytes for file in self._files.values() if file.owner == owner)
        return self.most_bytes - taken - sum(records.bytes_of(owner) for records in self._charged)

    def keep(self, path: Path, *, owner: str, filename: str, purpose: str, lifetime: float | None = None) -> StoredFile:
        """Takes a file that was written at a `new_path`.

        Raises:
            ApiError: the owner has no room left for it.
            OSError: the disk is full, or fails; nothing of it is kept.
        """
        size = path.stat().st_size
        if size > (room := self.room(owner)):
            raise ApiError(
                f"the file has {size} bytes, but only {max(room, 0)} of {self.most_bytes} are left: delete some files",
                status=413,
                param="file",
                code="no_room",
            )
        if sum(file.owner == owner for file in self._files.values()) >= MOST_FILES:
            raise ApiError(f"there are {MOST_FILES} files: delete some", param="file", code="no_room")
        now = self._clock()
        file = StoredFile(
            id=f"file-{uuid.uuid4().hex}",
            owner=owner,
            filename=cut(filename),
            purpose=purpose,
            bytes=size,
            created_at=int(now),
            expires_at=int(now + min(lifetime or self.lifetime, self.lifetime)),
        )
        os.replace(path, self.path(file))
        try:
            self._records.save(file)
        except OSError:
            self.path(file).unlink(missing_ok=True)
            raise
        self._files[file.id] = file
        return file

    def get(self, owner: str, id: str, *, field: str | None = None) -> StoredFile:
        """A file of one's own.

        Raises:
            ApiError: 404, there is none.
        """
        self._drop_expired()
        file = self._files.get(id)
        if file is None or file.owner != owner:
            raise ApiError(f"there is no file {cut(id)!r}", status=404, param=field, code="not_found")
        return file

    def path(self, file: StoredFile) -> Path:
        """Where its content is."""
        return self._folder / file.id

    def of(self, owner: str) -> list[StoredFile]:
        """All of an owner, the newest first."""
        self._drop_expired()
        return [file for file in reversed(self._files.values()) if file.owner == owner]

    def delete(self, file: StoredFile) -> None:
        del self._files[file.id]
        self.path(file).unlink(missing_ok=True)
        self._records.drop(file)

    def _drop_expired(self) -> None:
        now = self._clock()
        for file in [file for file in self._files.values() if file.expires_at <= now]:
            self.delete(file)


def page_of(items: list[T], name: Callable[[T], str], query: Mapping[str, str], *, most: int) -> tuple[list[T], bool]:
    """The part of a list that a request asks for with ``limit`` and ``after``, and whether there is more.

    Raises:
        ApiError: they are not what they must be.
    """
    limit, after = query.get("limit", "20"), query.get("after")
    if not re.fullmatch(r"[0-9]{1,5}", limit) or not 1 <= int(limit) <= most:
        raise ApiError(f"limit must be between 1 and {most}", param="limit", code="invalid_value")
    if after is not None:
        place = next((i for i, item in enumerate(items) if name(item) == after), None)
        if place is None:
            raise ApiError(f"there is no {cut(after)!r}", param="after", code="invalid_value")
        items = items[place + 1 :]
    return items[: int(limit)], len(items) > int(limit)
