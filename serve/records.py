"""What is known of things that outlive a server: a JSON file each, in a folder on a disk that may be full."""

from __future__ import annotations

import errno
import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import orjson
from pydantic import ConfigDict, TypeAdapter, ValidationError

from llmjax.serve.errors import ApiError

log = logging.getLogger("serve")

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
RECORD = ConfigDict(extra="forbid", strict=True)  # of the dataclasses
SET_ASIDE = ".damaged"  # appended to the name of a record that cannot be read


class Recorded(Protocol):
    """A dataclass whose fields are JSON."""

    @property
    def id(self) -> str: ...

    @property
    def owner(self) -> str: ...


T = TypeVar("T", bound=Recorded)


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Failures of the disk as errors of the API: 507 where it is full, else 500, and a line in the log.

    Args:
        what: cannot be done then.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        log.error("%s: %s", what, error)
        status = 507 if error.errno in FULL else 500
        raise ApiError(f"{what}: {reason}", status=status, code="storage_failed") from None


def new_draft(folder: Path) -> Path:
    """Where something may be written before it gets its name."""
    return folder / f"new-{uuid.uuid4().hex}"


class Records(Generic[T]):
    """Records of one kind.

    Args:
        folder: where they are.
        kind: a dataclass whose ``__pydantic_config__`` is ``RECORD``.
        names: pattern of their files' names, such as ``file-*``.
    """

    def __init__(self, folder: Path, kind: type[T], *, names: str) -> None:
        self._folder = folder
        self._type = TypeAdapter(kind)
        self._names = names
        self._sizes: dict[str, dict[str, int]] = {}  # bytes by owner and id

    def load(self) -> list[T]:
        """All that an earlier server has left. What cannot be read gets another name, and a warning."""
        return [found for path in sorted(self._folder.glob(f"{self._names}.json")) for found in self._read(path)]

    def _read(self, path: Path) -> Iterator[T]:
        try:
            data = path.read_bytes()
            record = self._type.validate_json(data)
            if path != self._path(record.id):
                raise ValueError(f"it is that of {record.id[:100]!r}")
        except (OSError, ValueError) as error:
            aside = path.with_name(path.name + SET_ASIDE)
            log.warning("%s is not a record that this version reads (%s); it is now %s", path, _why(error), aside.name)
            with suppress(OSError):  # of a folder that can only be read
                path.replace(aside)
            return
        self._note(record, len(data))
        yield record

    def save(self, thing: T) -> None:
        """Writes a record in one piece: a reader finds the old one or the new one.

        Raises:
            OSError: the disk is full, or fails.
        """
        data = orjson.dumps(asdict(thing))  # type: ignore[call-overload]
        draft = new_draft(self._folder)
        try:
            draft.write_bytes(data)
            os.replace(draft, self._path(thing.id))
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        self._note(thing, len(data))

    def drop(self, thing: T) -> None:
        """Forgets a record."""
        self._path(thing.id).unlink(missing_ok=True)
        self._sizes.get(thing.owner, {}).pop(thing.id, None)

    def bytes_of(self, owner: str) -> int:
        """What an owner's records take."""
        return sum(self._sizes.get(owner, {}).values())

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}.json"

    def _note(self, thing: T, size: int) -> None:
        self._sizes.setdefault(thing.owner, {})[thing.id] = size


def _why(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first: Any = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return ": ".join([*map(str, first["loc"]), first["msg"]])
    return str(error)
