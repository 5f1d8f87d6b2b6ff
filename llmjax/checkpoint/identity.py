"""Identifies a checkpoint's files: on one machine without reading them, and across machines by reading a small part."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from llmjax.checkpoint.gguf.file import SPLIT_NAME

SUFFIXES = (".safetensors", ".json")  # files of a folder that determine its weights
SAMPLES, SAMPLE_BYTES = 64, 4096  # the parts of a file that are read


def identity(path: Path) -> tuple[tuple[str, int, int, int, int], ...]:
    """Name, size, times of the last change in ns, and inode of all files that a checkpoint's weights come from.

    The system sets the time of a file's last change of any kind (ctime), so a file that was overwritten in place and
    got its old date back is recognized as another one.

    Args:
        path: a folder or a .gguf file.
    """
    found = []
    for file in _files(path):
        with contextlib.suppress(OSError):  # a missing file has no weights
            status = file.stat()
            times = status.st_mtime_ns, status.st_ctime_ns
            found.append((str(file.resolve()), status.st_size, *times, status.st_ino))
    return tuple(found)


def fingerprint(path: Path) -> str:
    """A digest of the weights that is equal on machines with copies of them: of each file's size and some evenly spaced
    parts of it.

    Args:
        path: a folder or a .gguf file.

    Raises:
        OSError: a file cannot be read.
    """
    found = hashlib.sha256()
    for file in _files(path):
        if file.suffix == ".json" or not file.exists():
            continue
        with file.open("rb") as content:
            size = content.seek(0, 2)
            found.update(size.to_bytes(8))
            for number in range(SAMPLES):
                content.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                found.update(content.read(SAMPLE_BYTES))
    return found.hexdigest()


def _files(path: Path) -> list[Path]:
    """The files that a checkpoint's weights come from."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    if (split := SPLIT_NAME.fullmatch(path.name)) is not None:
        return sorted(file for file in path.parent.glob("*.gguf") if file.name.startswith(split["stem"]))
    return [path]
