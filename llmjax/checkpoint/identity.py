"""Whether files are still those that they were, without reading them; whether they are those of another machine,
reading little of them."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from llmjax.checkpoint.gguf.file import SPLIT_NAME

SUFFIXES = (".safetensors", ".json")  # of a folder's files that weights come from
SAMPLES, SAMPLE_BYTES = 64, 4096  # of a file


def identity(path: Path) -> tuple[tuple[str, int, int, int, int], ...]:
    """Of all files that a checkpoint's weights come from: name, size, times of the last change in ns, and inode.

    The system sets the time of a file's last change of any kind (ctime), so that a file which was overwritten in place
    and given its old date back is another one too.

    Args:
        path: a folder or a .gguf file.
    """
    found = []
    for file in _files(path):
        with contextlib.suppress(OSError):  # what is not there has no weights
            status = file.stat()
            times = status.st_mtime_ns, status.st_ctime_ns
            found.append((str(file.resolve()), status.st_size, *times, status.st_ino))
    return tuple(found)


def fingerprint(path: Path) -> str:
    """A digest of the weights that is the same on machines that have copies of them: of each file, its size and some
    parts of it, evenly spaced.

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
    """That a checkpoint's weights come from."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    if (split := SPLIT_NAME.fullmatch(path.name)) is not None:
        return sorted(file for file in path.parent.glob("*.gguf") if file.name.startswith(split["stem"]))
    return [path]
