"""Opens a model's files. What is not one, a pipe for example, would be waited for without end."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

from llmjax.errors import CheckpointError, LLMJaxError


def check_regular(path: Path, *, error: type[LLMJaxError] = CheckpointError) -> None:
    """Raises ``error`` if there is something other than a file. What is not there at all is the reader's to report."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe, socket or device"
        raise error(f"{path}: is {kind}, not a file")


def map_file(path: Path) -> mmap.mmap | bytes:
    """A file's bytes, read when they are looked at; an empty one cannot be mapped, and is ``b""``.

    Raises:
        CheckpointError: it cannot be opened, or is not a file.
    """
    check_regular(path)
    try:
        with path.open("rb") as handle:
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if handle.seek(0, 2) else b""
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None


def read_object(path: Path, *, error: type[LLMJaxError] = CheckpointError) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        path: of the file.
        error: what is raised.

    Raises:
        LLMJaxError: the file cannot be read, or holds something else; an `error` that names it.
    """
    content = _read_json(path, error)
    if not isinstance(content, dict):
        raise error(f"{path}: is not a JSON object")
    return content


def read_list(path: Path, *, error: type[LLMJaxError] = CheckpointError) -> list[Any]:
    """The list in a JSON file; as `read_object`."""
    content = _read_json(path, error)
    if not isinstance(content, list):
        raise error(f"{path}: is not a JSON list")
    return content


def _read_json(path: Path, error: type[LLMJaxError]) -> Any:
    check_regular(path, error=error)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise error(f"{path}: is not valid JSON: {problem}") from None
    return content
