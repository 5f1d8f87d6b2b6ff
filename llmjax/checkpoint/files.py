"""Opens a model's files, and refuses what is not a file, such as a pipe, or is only a placeholder for one."""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmjax.errors import CheckpointError, LLMJaxError

# The first bytes of a pointer: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
PAGES = (b"<!doctype html", b"<html")

ADAPTER = "adapter_config.json"
PICKLED = (".bin", ".bin.index.json", ".pt", ".pth", ".ckpt")  # a hub may leave only the index in a folder


def check_file(path: Path, *, error: type[LLMJaxError] = CheckpointError) -> None:
    """Raises ``error`` if a path is not a file, or is a placeholder: a Git LFS pointer or an HTML page.

    A missing file is reported by the reader.
    """
    if not path.exists():
        return
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe, socket or device"
        raise error(f"{path}: is {kind}, not a file")
    try:
        with path.open("rb") as handle:
            start = handle.read(len(LFS_POINTER))
    except OSError:
        return  # the reader reports this too
    if start == LFS_POINTER:
        raise error(f"{path}: is a pointer of Git LFS, not the file itself; run `git lfs pull` in its folder")
    if start.lstrip().lower().startswith(PAGES):
        raise error(f"{path}: is an HTML page, not the file itself; download it again, by the link that says so")


def instead_of_weights(names: Sequence[str]) -> str:
    """The end of an error message that names what a folder has instead of a readable model, and what to do.

    Args:
        names: names of the folder's files.

    Returns:
        The end of the message; empty if there is neither an adapter nor PyTorch's pickled weights.
    """
    if ADAPTER in names:
        return (
            f", but {ADAPTER}: it is an adapter, not a model; name the model that it was made for, and this with "
            "--lora-modules NAME=PATH"
        )
    if pickled := next((name for name in names if name.endswith(PICKLED)), None):
        return (
            f", but {pickled}: PyTorch's pickled weights are not read, as they may run code; look for a revision with "
            ".safetensors files, or save the model with transformers' save_pretrained"
        )
    return ""


def map_file(path: Path) -> mmap.mmap | bytes:
    """Maps a file, so that its bytes are read when they are used; an empty file cannot be mapped, and is ``b""``.

    Raises:
        CheckpointError: it cannot be opened, or is not a file.
    """
    check_file(path)
    try:
        with path.open("rb") as handle:
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if handle.seek(0, 2) else b""
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None


def read_object(path: Path, *, error: type[LLMJaxError] = CheckpointError) -> dict[str, Any]:
    """Reads the object in a JSON file.

    Args:
        path: path of the file.
        error: class of the error to raise.

    Raises:
        LLMJaxError: the file cannot be read, or holds something else; this is an `error` that names it.
    """
    content = _read_json(path, error)
    if not isinstance(content, dict):
        raise error(f"{path}: is not a JSON object")
    return content


def object_if_there(path: Path, *, error: type[LLMJaxError] = CheckpointError) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file; arguments and errors as for `read_object`."""
    return read_object(path, error=error) if path.exists() else {}


def read_list(path: Path, *, error: type[LLMJaxError] = CheckpointError) -> list[Any]:
    """Reads the list in a JSON file; arguments and errors as for `read_object`."""
    content = _read_json(path, error)
    if not isinstance(content, list):
        raise error(f"{path}: is not a JSON list")
    return content


def _read_json(path: Path, error: type[LLMJaxError]) -> Any:
    check_file(path, error=error)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise error(f"{path}: is not valid JSON: {problem}") from None
    return content
