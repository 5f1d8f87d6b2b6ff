"""Files that clients leave on the server: in a bounded folder, each for the key that brought it."""

from __future__ import annotations

import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson

from llmjax.errors import ConfigError
from llmjax.serve.errors import ApiError, cut

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

    def body(self) -> dict[str, Any]:
        """OpenAI's ``FileObject``."""
        fields = {name: value for name, value in asdict(self).items() if name != "owner"}
        return {**fields, "object": "file", "status": "processed"}


class FileStore:
    """Files in a folder, and beside each what is known of it, as JSON: a later server finds them again.

    Args:
        folder: None: a temporary one, which goes with the server.
        most_bytes: that the files of one owner may take.
        lifetime: seconds that a file is kept.
        clock: seconds since 1970.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(
        self, folder: Path | None, *, most_bytes: int, lifetime: float, clock: Callable[[], float] = time.time
    ) -> None:
        self.most_bytes = most_bytes
        self._lifetime = lifetime
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
        known = (read_json(path) for path in folder.glob("file-*.json"))
        self._files = {fields["id"]: StoredFile(**fields) for fields in known if fields is not None}
        for path in folder.glob("new-*"):  # that a server which was killed has not finished
            path.unlink(missing_ok=True)

    @property
    def folder(self) -> Path:
        return self._folder

    def new_path(self) -> Path:
        """Where a file may be written before it is kept."""
        return self._folder / f"new-{uuid.uuid4().hex}"

    def room(self, owner: str) -> int:
        """Bytes that an owner may still leave here."""
        self._drop_expired()
        return self.most_bytes - sum(file.bytes for file in self._files.values() if file.owner == owner)

    def keep(self, path: Path, *, owner: str, filename: str, purpose: str, lifetime: float | None = None) -> StoredFile:
        """Takes a file that was written at a `new_path`.

        Raises:
            ApiError: the owner has no room left for it.
        """
        size = path.stat().st_size
        if size > (room := self.room(owner)):
            raise ApiError(
                f"the file has {size} bytes; of {self.most_bytes} are {max(room, 0)} left: delete files",
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
            expires_at=int(now + min(lifetime or self._lifetime, self._lifetime)),
        )
        os.replace(path, self._folder / file.id)
        write_json(self._folder / f"{file.id}.json", asdict(file))
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
        for path in (self._folder / file.id, self._folder / f"{file.id}.json"):
            path.unlink(missing_ok=True)

    def _drop_expired(self) -> None:
        now = self._clock()
        for file in [file for file in self._files.values() if file.expires_at <= now]:
            self.delete(file)


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    """In one piece: who reads it finds the old or the new."""
    draft = path.with_name(f"new-{uuid.uuid4().hex}")
    draft.write_bytes(orjson.dumps(fields))
    os.replace(draft, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """What `write_json` has written; None: it is damaged."""
    try:
        fields = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    return fields if isinstance(fields, dict) else None


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
