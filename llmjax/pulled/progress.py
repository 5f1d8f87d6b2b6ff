"""What is told of a pull while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """What a pull is doing.

    Args:
        status: in words, as Ollama has them.
        digest: the file that it is about, as ``sha256:`` and its hash.
        total: the file's size in bytes.
        completed: bytes of it that are there.
    """

    status: str
    digest: str | None = None
    total: int | None = None
    completed: int | None = None

    @classmethod
    def of_file(cls, sha256: str, *, total: int, completed: int) -> Step:
        """A file that is on its way."""
        return cls(f"pulling {sha256[:12]}", f"sha256:{sha256}", total, completed)


Tell = Callable[[Step], None]
