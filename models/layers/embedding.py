"""The spec of learned position embeddings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LearnedPositions:
    """A vector for each position, added to the token's (GPT-2, OPT)."""

    count: int  # positions
    offset: int = 0  # rows before the row of position 0
