"""What is told of a session that was replayed: errors, the prefix cache, and first tokens."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.agents.replay import Turn


@dataclass(frozen=True, kw_only=True)
class Figures:
    """An agent's session at a server.

    Args:
        turns: None: an error took its place.
        alone: seconds to the first token of prompts without a history that have as many tokens as were new, from the
            second turn on; None: there was no such turn.
        errors: requests that were refused or broken off, and events that are not of the API's types.
    """

    turns: Sequence[Turn | None]
    alone: Sequence[float | None] = ()
    errors: list[str] = field(default_factory=list)

    @property
    def later(self) -> list[Turn]:
        """All turns but the first, which finds nothing in the cache."""
        return [turn for turn in self.turns[1:] if turn is not None]

    @property
    def cached(self) -> float:
        """The cached share of the tokens of all prompts but the first."""
        return sum(turn.cached_tokens for turn in self.later) / sum(turn.prompt_tokens for turn in self.later)

    def first_seconds(self, percentile: float) -> float:
        """A percentile of the times to the first token, from the second turn on."""
        return float(np.percentile([turn.first_seconds for turn in self.later], percentile))

    @property
    def computed_seconds(self) -> float | None:
        """In which the new tokens of a turn were computed after their history: the median."""
        found = [turn.computed_seconds for turn in self.later if turn.computed_seconds]
        return statistics.median(found) if found else None

    @property
    def other_seconds(self) -> float | None:
        """What the first token took beside that: reading the request, template, tokenizer, the search for pages, the
        way to the engine and back. The median."""
        found = [turn.first_seconds - turn.computed_seconds for turn in self.later if turn.computed_seconds]
        return statistics.median(found) if found else None

    @property
    def over_computed(self) -> float | None:
        """The first token's time over that in which the new tokens were computed after their history: the median."""
        ratios = [turn.first_seconds / turn.computed_seconds for turn in self.later if turn.computed_seconds]
        return statistics.median(ratios) if ratios else None

    @property
    def over_alone(self) -> float | None:
        """The first token's time over that of as many tokens without a history: the median."""
        ratios = [
            turn.first_seconds / alone
            for turn, alone in zip(self.turns[1:], self.alone, strict=False)
            if turn is not None and alone
        ]
        return statistics.median(ratios) if ratios else None

    def record(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {
            "errors": self.errors,
            "cached": self.cached if self.later else None,
            "turns": [
                turn
                and {
                    "prompt": turn.prompt_tokens,
                    "cached": turn.cached_tokens,
                    "first_seconds": turn.first_seconds,
                    "computed_seconds": turn.computed_seconds,
                }
                for turn in self.turns
            ],
            "alone_seconds": list(self.alone),
        }
