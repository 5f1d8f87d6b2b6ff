"""JSON files that must hold an object: config.json and what lies beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmjax.checkpoint.regular_file import check_regular
from llmjax.errors import CheckpointError, LLMJaxError


def read_object(path: Path, *, error: type[LLMJaxError] = CheckpointError) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        path: of the file.
        error: what is raised.

    Raises:
        LLMJaxError: the file cannot be read, or holds something else; an `error` that names it.
    """
    check_regular(path, error=error)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise error(f"{path}: is no valid JSON: {problem}") from None
    if not isinstance(content, dict):
        raise error(f"{path}: is no JSON object")
    return content
