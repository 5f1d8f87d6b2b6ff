"""Whether files are still those that they were, without reading them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from llmjax.checkpoint.gguf.file import SPLIT_NAME

SUFFIXES = (".safetensors", ".json")  # of a folder's files that weights come from


def identity(path: Path) -> tuple[tuple[str, int, int, int, int], ...]:
    """Of all files that a checkpoint's weights come from: name, size, times of the last change in ns, and inode.

    The system sets the time of a file's last change of any kind (ctime), so that a file which was overwritten in place
    and given its old date back is another one too.

    Args:
        path: a folder or a .gguf file.
    """
    if path.is_dir():
        files = [file for file in path.iterdir() if file.suffix in SUFFIXES]
    elif (split := SPLIT_NAME.fullmatch(path.name)) is not None:
        files = [file for file in path.parent.glob("*.gguf") if file.name.startswith(split["stem"])]
    else:
        files = [path]
    found = []
    for file in sorted(files):
        with contextlib.suppress(OSError):  # what is not there has no weights
            status = file.stat()
            times = status.st_mtime_ns, status.st_ctime_ns
            found.append((str(file.resolve()), status.st_size, *times, status.st_ino))
    return tuple(found)
