"""Where adapters that requests name may be: below one folder, and as files that hold no code."""

from __future__ import annotations

import asyncio
from pathlib import Path

from llmjax.adapters.reference import files_of
from llmjax.errors import CheckpointError
from llmjax.serve.errors import ApiError


async def path_below(root: str, given: str) -> Path:
    """The adapter at a path of a request, which is absolute or begins at the root.

    Raises:
        ApiError: there is none below the root; links are followed first.
    """
    return await asyncio.to_thread(_path_below, Path(root).expanduser(), given)


def _path_below(root: Path, given: str) -> Path:
    outside = ApiError(
        "there is no adapter at that path below the folder of --lora-root", param="lora_path", code="invalid_value"
    )
    try:
        below = root.resolve(strict=True)
        path = (root / given).resolve(strict=True)
        if not path.is_relative_to(below):
            raise outside
        files = files_of(path)
        if not all(file.resolve(strict=True).is_relative_to(below) for file in files):
            raise outside
    except CheckpointError as error:
        raise ApiError(str(error).replace(str(path), repr(given)), param="lora_path", code="invalid_adapter") from error
    except (OSError, ValueError, RuntimeError):
        raise outside from None
    return path


def shown_path(root: str | None, path: str) -> str:
    """An adapter's path as clients see it: from the root, or its last part."""
    here = Path(path)
    if root is not None and here.is_relative_to(below := Path(root).expanduser().resolve()):
        return str(here.relative_to(below))
    return here.name
