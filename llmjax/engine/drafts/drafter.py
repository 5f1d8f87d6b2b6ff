"""Drafters: guess the next tokens of one sequence, and measure how good the guesses are."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

from llmjax.engine.drafts.ngrams import NgramIndex
from llmjax.speculative import SpeculativeConfig

MEMORY = 0.8  # weight of a guess relative to the next one
PRIOR, PRIOR_WEIGHT = 2 / 3, 3.0  # the first estimate of the share of right drafts, and its weight, in guesses
UNKNOWN = 0  # a draft that the host does not know: any token will do


class Drafter(Protocol):
    """Drafts of one sequence, and how good they are."""

    def drafts(self) -> tuple[int, ...]:
        """Tokens that may follow the known ones; empty: there is no guess."""
        ...

    @property
    def acceptance(self) -> float:
        """Probability that a draft is right if all drafts before it are."""
        ...

    def verified(self, *, right: int, of: int) -> None:
        """Notes that a step has verified ``of`` drafts, the first ``right`` of which were right."""
        ...


class Acceptance:
    """How good recent drafts have been.

    Args:
        share: first estimate of ``share``, from before there are any drafts.
    """

    def __init__(self, share: float = PRIOR) -> None:
        self._right, self._wrong = share * PRIOR_WEIGHT, (1 - share) * PRIOR_WEIGHT

    @property
    def share(self) -> float:
        """Share of the drafts that are right, among those before which all drafts are right."""
        return self._right / (self._right + self._wrong)

    def learn(self, *, right: int, of: int) -> None:
        """Notes that the first ``right`` of ``of`` drafts were right."""
        self._right = MEMORY * self._right + right
        self._wrong = MEMORY * self._wrong + (right < of)


class ModelDrafter:
    """A drafter for a draft model, which guesses on the device in the step that verifies its guesses.

    Args:
        count: drafts of a step.
        of_all: how good the drafts of all sequences are, the first estimate for this one.
    """

    def __init__(self, count: int, of_all: Acceptance) -> None:
        self._places = (UNKNOWN,) * count
        self._of_all = of_all
        self._own = Acceptance(of_all.share)

    def drafts(self) -> tuple[int, ...]:
        """A placeholder for each draft."""
        return self._places

    @property
    def acceptance(self) -> float:
        return self._own.share

    def verified(self, *, right: int, of: int) -> None:
        for acceptance in (self._own, self._of_all):
            acceptance.learn(right=right, of=of)


class LookupDrafter:
    """A drafter by prompt lookup.

    Each guess is compared with the tokens that follow, whether a step verified it or not. So it is also known how good
    guesses would have been for text that is decoded without drafts.

    Args:
        tokens: the sequence's tokens, to which more are added.
    """

    def __init__(self, tokens: list[int], config: SpeculativeConfig) -> None:
        self._tokens = tokens
        self._config = config
        self._guess: tuple[int, ...] = ()
        self._at = 0  # tokens that stand before the guess
        self._own = Acceptance()

    def drafts(self) -> tuple[int, ...]:
        known = len(self._tokens)
        if self._guess and known > self._at:
            self._learn()
        if not self._guess or known > self._at:
            self._guess, self._at = self._index.continuation(self._config.num_speculative_tokens), known
        return self._guess

    @property
    def acceptance(self) -> float:
        return self._own.share

    def verified(self, *, right: int, of: int) -> None:
        """Does nothing: the sequence's new tokens show the same."""

    @cached_property
    def _index(self) -> NgramIndex:
        config = self._config
        return NgramIndex(self._tokens, shortest=config.prompt_lookup_min, longest=config.prompt_lookup_max)

    def _learn(self) -> None:
        came = self._tokens[self._at : self._at + len(self._guess)]
        right = next((i for i, (a, b) in enumerate(zip(came, self._guess, strict=False)) if a != b), len(came))
        self._own.learn(right=right, of=len(came))
