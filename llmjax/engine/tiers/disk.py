"""The disk tier: pages in a folder, each in a file, which later starts find. Several engines may share the folder.

The folder is a digest of all that decides the content of pages (`identity` of the model, types, page size and so on);
the file's name is the group and the key. A file that is not whole, or does not have the content that its name says, is
removed with a warning, and its page is computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from llmjax.engine.core.page_pool import DIGEST_BYTES
from llmjax.engine.core.tier import KeptPage, PageName
from llmjax.engine.loading.kept_files import Damaged, check_owner, line
from llmjax.engine.tiers.host import PageFormat

logger = logging.getLogger(__name__)

MAGIC = b"llmjax kv page 1\n"
CHECKSUM_BYTES = 16
HEADER_BYTES = len(MAGIC) + CHECKSUM_BYTES
SUFFIX = ".kv"
NAME = re.compile(rf"([0-9a-f]{{{2 * DIGEST_BYTES}}})-(\d+){re.escape(SUFFIX)}")
UNFINISHED = "."  # beginning of the names of files that are being written
FORGOTTEN = 3600.0  # seconds without a write, after which such a file counts as abandoned
KEPT_FREE = 0.05  # share of the disk
LOOKS = 16  # looks at the whole folder while its limit is written once: other processes write there too


class DiskPages:
    """The pages of one identity; may be used by several threads.

    Args:
        folder: folder of all identities; made if it is not there.
        identity: hexadecimal digits.
        limit: most bytes of all files in the folder, those of other identities too. The least recently used go first.
        formats: formats of pages, by group.

    Raises:
        OSError: the folder cannot be made, read or written.
    """

    def __init__(self, folder: Path, *, identity: str, limit: int, formats: Sequence[PageFormat]) -> None:
        self._all = folder
        self._own = folder / identity
        self._limit = limit
        self._formats = formats
        self._lock = threading.Lock()  # guards the fields below
        self._known: set[PageName] = set()
        self._num_bytes = 0  # bytes of the folder, as far as this process knows
        self._unseen = 0  # bytes written since the folder was looked at
        self._warned = False
        self._looks = 0  # grows when what is being looked at is out of date
        self._own.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=self._own):  # what cannot be written is better known now
            pass
        self._make_room(0)

    def __contains__(self, name: PageName) -> bool:
        return name in self._known

    @property
    def num_bytes(self) -> int:
        """Bytes of all files in the folder, as far as is known."""
        return self._num_bytes

    def write(self, name: PageName, page: KeptPage) -> int:
        """Keeps a page. Errors are only logged, once: the page is then not kept.

        Returns:
            Bytes written; 0 if the page is already there, or there is no room for it.
        """
        path = self._path(name)
        payload = self._formats[name[0]].encode(page)
        size = HEADER_BYTES + len(payload)
        try:
            if name in self._known:
                os.utime(path)
                return 0
            if size > self._limit:
                return self._warn(f"a page has {size:,} bytes, and all may have {self._limit:,}")
            disk = shutil.disk_usage(self._own)
            if disk.free - size < KEPT_FREE * disk.total:
                return self._warn(f"less than {KEPT_FREE:.0%} of the disk would be free")
            self._make_room(size)
            _write(path, (MAGIC, _checksum(path.name, payload), payload))
        except FileNotFoundError:  # another process has emptied the folder
            with self._lock:
                self._known.discard(name)
            with contextlib.suppress(OSError):
                self._own.mkdir(parents=True, exist_ok=True, mode=0o700)
            return 0
        except OSError as error:
            return self._warn(line(error))
        with self._lock:
            self._known.add(name)
            self._num_bytes += size
            self._unseen += size
        return size

    def read(self, name: PageName) -> KeptPage | None:
        """The page; None: it is not there any more, or damaged."""
        path = self._path(name)
        try:
            with path.open("rb") as file:
                check_owner(os.fstat(file.fileno()))
                content = file.read()
            page = self._page(name, content)
            os.utime(path)  # shows that the page is in use
            return page
        except FileNotFoundError:
            self._drop(name)
        except (OSError, Damaged) as error:
            logger.warning("%s is not used, and its page is computed again: %s", path, line(error))
            self.remove(name)
        return None

    def remove(self, name: PageName) -> None:
        """Removes a page if it is there."""
        self._drop(name)
        with contextlib.suppress(OSError):
            self._path(name).unlink()

    def forget_all(self) -> None:
        """Forgets all pages; `remove_all` has to follow."""
        with self._lock:
            self._known = set()
            self._looks += 1

    def remove_all(self) -> None:
        """Removes all pages of this identity."""
        for name, _ in list(self._files(self._own)):
            self.remove(name)

    def _warn(self, why: str) -> int:
        """Says that pages are not kept, and returns 0, the bytes that were written."""
        if not self._warned:
            logger.warning("%s: pages are not kept (said once): %s", self._all, why)
        self._warned = True
        return 0

    def _page(self, name: PageName, content: bytes) -> KeptPage:
        payload = content[HEADER_BYTES:]
        if content[:HEADER_BYTES] != MAGIC + _checksum(self._path(name).name, payload):
            raise Damaged("it is cut short, damaged or another page's")
        try:
            return self._formats[name[0]].decode(payload)
        except ValueError as error:
            raise Damaged(str(error)) from error

    def _path(self, name: PageName) -> Path:
        group, digest = name
        return self._own / f"{digest.hex()}-{group}{SUFFIX}"

    def _drop(self, name: PageName) -> None:
        with self._lock:
            self._known.discard(name)

    def _make_room(self, size: int) -> None:
        """Removes the least recently used pages until ``size`` more bytes are within the limit."""
        with self._lock:
            look = self._looks
            looked = self._known and self._unseen < self._limit // LOOKS
            if looked and self._num_bytes + size <= self._limit:
                return
        own: set[PageName] = set()
        files: list[tuple[float, int, Path]] = []
        for folder in [entry for entry in self._all.iterdir() if entry.is_dir()]:
            for name, (used, num_bytes, path) in self._files(folder):
                files.append((used, num_bytes, path))
                if folder == self._own:
                    own.add(name)
            if folder != self._own:
                with contextlib.suppress(OSError):  # it is not empty
                    if time.time() - folder.stat().st_mtime > FORGOTTEN:
                        folder.rmdir()
        total = sum(num_bytes for _, num_bytes, _ in files)
        files.sort(reverse=True)
        # A little more than needed: looking at all of them for each page would take longer than the pages.
        target = self._limit if total + size <= self._limit else self._limit - self._limit // LOOKS
        while files and total + size > target:
            _, num_bytes, path = files.pop()
            with contextlib.suppress(OSError):  # another process has removed it
                path.unlink()
            total -= num_bytes
            if path.parent == self._own:
                own.discard(_name(path.name))
        with self._lock:
            self._known = own if look == self._looks else self._known
            self._num_bytes, self._unseen = total, 0

    @staticmethod
    def _files(folder: Path) -> Iterator[tuple[PageName, tuple[float, int, Path]]]:
        """Yields the pages of a folder, each with its last use, bytes and path. Removes abandoned unfinished files."""
        try:
            entries = list(os.scandir(folder))
        except OSError:  # another process has removed it
            return
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat()
                if NAME.fullmatch(entry.name):
                    yield _name(entry.name), (status.st_mtime, status.st_size, Path(entry.path))
                elif entry.name.startswith(UNFINISHED) and time.time() - status.st_mtime > FORGOTTEN:
                    os.unlink(entry.path)


def _name(file: str) -> PageName:
    match = NAME.fullmatch(file)
    assert match is not None
    return int(match[2]), bytes.fromhex(match[1])


def _checksum(file: str, payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=CHECKSUM_BYTES, key=file.encode()).digest()


def _write(path: Path, parts: Iterable[bytes]) -> None:
    """Writes a file that others see whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=UNFINISHED, delete=False) as file:
        try:
            file.writelines(parts)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise
