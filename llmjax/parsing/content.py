"""Which text of an answer is content, and where the answer ends, for those who see its text before it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmjax.parsing.parser import OutputParser


@dataclass(frozen=True, kw_only=True)
class ContentReading:
    """How an answer is read of which not all text is content.

    Args:
        parser: makes one for each continuation; what it has read already stands before the continuation.
        one_call: the answer ends with its first call.
    """

    parser: Callable[[], OutputParser]
    one_call: bool = False
