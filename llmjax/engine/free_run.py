"""Tokens of sequences with a grammar that are sampled without its masks: how many at a time, and which of them hold.

A token is the likeliest one, by its logit and the noise of its position. If the likeliest of all tokens is one that the
grammar allows, it is the likeliest of those that a mask leaves, too: so it is the token that a step with a mask would
have sampled, and where it is not allowed, a step with a mask follows. Top-k, top-p and min-p look at other tokens than
the one that is sampled, so where they are asked for there are no free runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher

MEMORY = 0.8  # weight of all runs before one among those up to it
PRIOR = (4.0, 1.0)  # tokens that were allowed, and that were not, before the first
LEAST = 2.0  # tokens that a run should bring: fewer are not worth those that it may lose


class FreeRun:
    """How far one sequence may run without a mask."""

    def __init__(self) -> None:
        self._allowed, self._refused = PRIOR
        self._masked = True  # the next token needs one: the first does, and one behind a token that was refused

    @property
    def steps(self) -> int:
        """Tokens that the next dispatch may sample; 0: one, under a mask."""
        if self._masked or self._allowed < LEAST * self._refused:
            return 0
        return int(self._allowed / self._refused)

    def ran(self, *, allowed: int, of: int) -> None:
        """A run sampled so many tokens, of which the first ``allowed`` were."""
        self._allowed = MEMORY * self._allowed + allowed
        self._refused = MEMORY * self._refused + (allowed < of)
        self._masked = allowed < of

    def masked(self) -> None:
        """A token was sampled under a mask. What is known of runs counts for less, so that another will be tried."""
        self._refused *= MEMORY
        self._masked = False


def num_allowed(matcher: LLMatcher, tokens: Sequence[int]) -> int:
    """How many of some tokens are those that masks would have let through, one after another.

    Args:
        matcher: before the first of them; stays as it is.
    """
    reader = matcher.deep_copy()
    for count, token in enumerate(tokens):
        # Where only one text can follow, a mask has that text's own token alone.
        forced = reader.compute_ff_tokens()
        if (forced and token != forced[0]) or reader.is_stopped() or not reader.consume_token(token):
            return count
    return len(tokens)
