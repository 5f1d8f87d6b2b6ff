"""Golden ids and the corpus they were made for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

GOLDEN = Path(__file__).parent / "golden"


def _load(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text())


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    """Texts that tokenizers disagree about."""
    return [entry if isinstance(entry, str) else entry["repeat"] * entry["times"] for entry in _load("corpus")]


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Any]:
    """A golden file by name."""
    return _load


@pytest.fixture(scope="session")
def same_ids() -> Callable[[list[int], list[int] | str], bool]:
    """Whether ids are the golden ones; long golden lists are stored as a hash."""

    def same(ids: list[int], expected: list[int] | str) -> bool:
        if isinstance(expected, str):
            return hashlib.sha256(repr(ids).encode()).hexdigest() == expected
        return ids == expected

    return same


@pytest.fixture(scope="session")
def gguf_keys() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Metadata of a GGUF file: keys get their prefix, lists of numbers become arrays."""

    def keys(vocabulary: dict[str, Any]) -> dict[str, Any]:
        def value(item: Any) -> Any:
            if isinstance(item, list) and not isinstance(item[0], str):
                return np.array(item, np.float32 if isinstance(item[0], float) else np.int32)
            return item

        return {f"tokenizer.ggml.{key}": value(item) for key, item in vocabulary.items()}

    return keys
