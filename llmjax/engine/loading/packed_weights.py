"""Packed matrices on disk: a later start maps them into memory instead of packing them again.

A model has one file. Its name is a digest of all that decides its content: the files that the model is read from
(`identity`), the form in which matrices are kept, the platform's layout, and this package's sources. So a file is never
out of date, only unused; the least recently used files are removed when there are too many.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import mmap
import os
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llmjax.checkpoint import Checkpoint
from llmjax.config import EngineConfig
from llmjax.engine.loading.kept_files import Damaged, check_owner, line
from llmjax.engine.programs.signature import LIBRARIES, SourcesChanged, digest, sources_digest
from llmjax.platforms import Platform
from llmjax.weights.memory import HUGE_PAGE, HugePages
from llmjax.weights.packing import RowSource, RowStack, pack, words_shape

logger = logging.getLogger(__name__)

FOLDER = "weights"
MAGIC = b"llmjax weights 1\n"
HEADER = struct.Struct(f"<{len(MAGIC)}s32sQQ")  # magic, key, where the index stands, its length
ALIGNMENT = 4096
UNFINISHED = "."  # beginning of the names of files that are being written
FORGOTTEN = 3600.0  # seconds without a write, after which such a file counts as abandoned
KEPT_FREE = 0.05  # share of the disk
KEEPER = "keep-weights"
MOST = 64  # files, however small
WORD = np.dtype("<u4")


class PackedWeights:
    """The packed matrices of one model: read from their file if there is one, else packed and written to it.

    Args:
        path: path of the file; None: nothing is kept.
        limit: most bytes of all such files.
        stay: whether matrices stay where they were packed, so that they can be written once all of them are there.
    """

    def __init__(self, path: Path | None = None, *, limit: int = 0, stay: bool = False) -> None:
        self._path = path
        self._limit = limit
        self.mapped_bytes = 0  # bytes of matrices that `words` has found
        self._found = {} if path is None else _read(path)
        self._writer = None if path is None or self._found else _Writer.begin(path, limit, later=stay)
        self._finishing: threading.Thread | None = None
        self._memory = HugePages()

    @classmethod
    def of(
        cls, directory: Path | None, config: EngineConfig, checkpoint: Checkpoint, platform: Platform, *, files: Any
    ) -> PackedWeights:
        """The packed weights of a model with its configuration.

        Args:
            directory: folder of JAX's compilation cache; None: nothing is kept.
            files: `identity` of the checkpoint, from before it was opened.
        """
        limit = config.packed_weights_bytes
        if directory is None or limit == 0:
            return cls()
        try:
            key = digest(
                MAGIC,
                sources_digest(),
                {name: version(name) for name in LIBRARIES},
                files,
                checkpoint.config,
                (config.quantization, config.quantization_rules, config.num_experts_offload_per_rank),
                (platform.weight_tile, len(platform.devices), config.enable_expert_parallel),
                (config.node_rank, config.nnodes, config.pipeline_parallel_size),
            )
        except (OSError, SourcesChanged, TypeError) as why:
            logger.debug("weights are packed at every start: %s", why)
            return cls()
        return cls(directory / FOLDER / key, limit=limit, stay=platform.device.platform == "cpu")

    def words(self, name: str, source: RowSource | RowStack, *, tile: int) -> np.ndarray:
        """Packs a matrix as `pack` does, or finds it in the file; what was found is read-only.

        Args:
            name: name of the matrix, or of the part of it; each may be given once.
        """
        words = self._found.get(name)
        if words is not None and words.shape == words_shape(source, tile=tile):
            self.mapped_bytes += words.nbytes
            return words
        if self._found and self._path is not None:
            logger.warning("%s is not used: it does not hold %s as it should be", self._path, name)
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._found = {}
        words = pack(source, tile=tile, empty=self._memory.empty)
        if self._writer is not None and not self._writer.add(name, words):
            self._writer = None
        return words

    def keep(self) -> None:
        """Finishes the file, if it is a new one, without waiting for the disk; no matrix may be added after it."""
        self._found = {}
        if (writer := self._writer) is not None:
            self._writer = None
            # A daemon: what is not on the disk when the process ends is packed again.
            self._finishing = threading.Thread(target=writer.finish, name=KEEPER, daemon=True)
            self._finishing.start()

    def discard(self) -> None:
        """Keeps nothing, because the model's files have changed while they were read."""
        self._found = {}
        if self._writer is not None:
            self._writer.discard()
            self._writer = None

    def wait(self, timeout: float) -> None:
        """Waits until `keep` is done, for ``timeout`` seconds at most."""
        if self._finishing is not None:
            self._finishing.join(timeout)


def _read(path: Path) -> dict[str, np.ndarray]:
    """The matrices by name, mapped into memory; empty: there is no file, or not a sound one."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            check_owner(status)
            if status.st_size < HEADER.size:
                raise Damaged("it is cut short")
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux; for what the page cache does not hold yet
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        found = dict(_arrays(memory, bytes.fromhex(path.name)))
        os.utime(path)  # shows that the file is in use
        return found
    except FileNotFoundError:
        return {}
    except (OSError, Damaged, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is not used, and weights are packed again: %s", path, line(error))
        return {}


def _arrays(memory: mmap.mmap, key: bytes) -> Iterator[tuple[str, np.ndarray]]:
    magic, its_key, start, length = HEADER.unpack_from(memory)
    if (magic, its_key) != (MAGIC, key) or start + length != len(memory):
        raise Damaged("it is cut short, damaged or another model's")
    index = json.loads(memory[start : start + length])
    if not isinstance(index, dict):
        raise Damaged("its index is not an object")
    for name, (offset, shape) in index.items():
        count = int(np.prod(shape))
        if offset % ALIGNMENT or offset + count * WORD.itemsize > start:
            raise Damaged(f"{name} lies beyond its end")
        yield name, np.frombuffer(memory, WORD, count, offset).reshape(shape)


class _Writer:
    """Writes a file that others see whole or not at all, matrix by matrix, in one process at a time.

    Args:
        later: whether matrices are written only at the end.
    """

    def __init__(self, file: BinaryIO, unfinished: Path, path: Path, limit: int, *, later: bool) -> None:
        self._file = file  # locked while it is open
        self._pieces = _Pieces(file)
        self._later: list[np.ndarray] | None = [] if later else None
        self._end = HEADER.size  # end of all matrices
        self._unfinished = unfinished
        self._path = path
        self._limit = limit
        self._index: dict[str, Any] = {}

    @classmethod
    def begin(cls, path: Path, limit: int, *, later: bool = False) -> _Writer | None:
        """Begins a file; None: it cannot be written, or another process is writing it."""
        unfinished = path.with_name(UNFINISHED + path.name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.fdopen(os.open(unfinished, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        except OSError as error:
            logger.debug("packed weights are not kept: %s", error)
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), unfinished.stat()):
                raise FileExistsError("another process has just finished it")
            file.truncate(0)  # removes what a killed process has left
        except OSError as error:
            logger.debug("packed weights are not kept by this process: %s", error)
            file.close()
            return None
        return cls(file, unfinished, path, limit, later=later)

    def add(self, name: str, words: np.ndarray) -> bool:
        """Adds a matrix; returns whether there was room for it. If not, nothing is kept."""
        try:
            offset = _aligned(self._end)
            disk = shutil.disk_usage(self._path.parent)
            end = offset + words.nbytes
            if end > self._limit or disk.free - (end - self._pieces.written) < KEPT_FREE * disk.total:
                logger.info("weights are packed at every start: there is not enough room for them")
                self.discard()
                return False
            words = np.ascontiguousarray(words, WORD)
            if self._later is None:
                self._pieces.put(words, offset)
            else:
                self._later.append(words)
        except OSError as error:
            logger.debug("packed weights are not kept: %s", error)
            self.discard()
            return False
        self._index[name] = (offset, words.shape)
        self._end = end
        return True

    def finish(self) -> None:
        """Gives the file its name, so that others find it, and removes the files beyond the limit."""
        if not self._index:
            self.discard()
            return
        try:
            if self._later is not None:
                for words, (offset, _) in zip(self._later, self._index.values(), strict=True):
                    self._pieces.put(words, offset)
            index, start = json.dumps(self._index).encode(), _aligned(self._end)
            self._pieces.put(np.frombuffer(index, np.uint8), start)
            self._pieces.finish()
            self._file.seek(0)
            _write_all(self._file, memoryview(HEADER.pack(MAGIC, bytes.fromhex(self._path.name), start, len(index))))
            os.fsync(self._file.fileno())  # a crash must not leave a file of this name with holes in it
            os.replace(self._unfinished, self._path)
            self._file.close()
        except OSError as error:
            logger.debug("packed weights are not kept: %s", error)
            self.discard()
            return
        _make_room(self._path, self._limit)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._unfinished.unlink()
        with contextlib.suppress(OSError):
            self._file.close()


class _Pieces:
    """Writes an unbuffered file in whole huge pages, so that the page cache keeps and maps huge pages.

    Attributes:
        written: bytes.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._begun = bytearray()  # what follows the written part, less than a huge page
        self.written = 0

    def put(self, array: np.ndarray, start: int) -> None:
        """Writes an array's content from byte ``start`` on, which is not before the end of the last array."""
        self._append(memoryview(bytes(start - self.written - len(self._begun))))
        self._append(array.data.cast("B"))

    def finish(self) -> None:
        """Writes what is left."""
        self._write(memoryview(self._begun))

    def _append(self, content: memoryview) -> None:
        first = min(-len(self._begun) % HUGE_PAGE, content.nbytes)
        self._begun += content[:first]
        if len(self._begun) == HUGE_PAGE:
            self._write(memoryview(self._begun))
            self._begun = bytearray()
        last = first + (content.nbytes - first) // HUGE_PAGE * HUGE_PAGE
        for start in range(first, last, HUGE_PAGE):
            self._write(content[start : start + HUGE_PAGE])
        self._begun += content[last:]

    def _write(self, piece: memoryview) -> None:
        _write_all(self._file, piece)
        self.written += piece.nbytes


def _aligned(end: int) -> int:
    return -(-end // ALIGNMENT) * ALIGNMENT


def _write_all(file: BinaryIO, content: memoryview) -> None:
    while content.nbytes:
        content = content[file.write(content) :]


def _make_room(new: Path, limit: int) -> None:
    """Removes the least recently used files until all files together are within the limit."""
    files = []
    for path in new.parent.iterdir():
        with contextlib.suppress(OSError):  # another process has removed it
            status = path.stat()
            if not path.name.startswith(UNFINISHED):
                files.append((path == new, status.st_mtime, status.st_size, path))
            elif time.time() - status.st_mtime > FORGOTTEN:
                path.unlink()
    total = 0
    for count, (_, _, size, path) in enumerate(sorted(files, reverse=True)):
        total += size
        if total > limit or count >= MOST:
            with contextlib.suppress(OSError):
                path.unlink()
