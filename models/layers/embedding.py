"""The spec of learned position embeddings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LearnedPositions:
    """A vector for each position, added to the token's (GPT-2, OPT).

    Attributes:
        count: positions that have one.
        offset: rows before the row of the first of them.
        first: the first of them (BLIP, where a picture is before it).
    """

    count: int
    offset: int = 0
    first: int = 0
