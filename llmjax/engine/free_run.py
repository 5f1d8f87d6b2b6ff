"""Tokens of sequences with a grammar that are sampled without its masks: how many at a time, and which of them hold.

A token is the likeliest one, by its logit and the noise of its position. If the likeliest of all tokens is one that the
grammar allows, it is the likeliest of those that a mask leaves, too: so it is the token that a step with a mask would
have sampled, and where it is not allowed, a step with a mask follows. Top-k, top-p and min-p look at other tokens than
the one that is sampled, so where they are asked for there are no free runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmjax.constraints.step_matcher import StepMatcher

MEMORY = 0.8  # weight of all runs before one among those up to it
FADING = 0.96  # of refusals, with each token under a mask: some time another run is tried
LEAST = 6  # steps of a run; where more is refused, masks, a fifth of a step each, cost less than tokens in vain
OVERHEAD = 0.55  # of a dispatch that waits until the one before is read: parts of a step of 4 ms
WIDE = 0.5  # share of the vocabulary that a mask leaves where a grammar asks for little, as inside strings
CERTAIN = 1 / 32  # chance of a refusal that is worth less than the time between two dispatches
PRIORS = {True: (34.0, 1.0), False: (8.0, 1.0)}  # tokens that were allowed, and that were not, before the first
LASTING = 0.99  # weight of all runs of an engine before one among those up to it
SUREST = 1024.0  # tokens for each that is refused, of which a new sequence is sure at most


class Refusals:
    """What sequences with a grammar have met in an engine, for the next one to begin with: how often is as much the
    model's habit as the grammar's."""

    def __init__(self) -> None:
        self._counts = dict(PRIORS)

    def priors(self) -> dict[bool, tuple[float, float]]:
        """Tokens for each that is refused, behind wide masks (True) and others: as much as one refusal, so that a
        sequence with which it is different soon finds out."""
        return {wide: (min(allowed / refused, SUREST), 1.0) for wide, (allowed, refused) in self._counts.items()}

    def ran(self, *, wide: bool, allowed: int, refused: bool) -> None:
        """A run of some sequence."""
        before, others = self._counts[wide]
        self._counts[wide] = (LASTING * before + allowed, LASTING * others + refused)


class FreeRun:
    """How far one sequence may run without a mask. Where its last mask was a wide one, and where not, is learned apart:
    small models seldom write the commas and brackets that a form wants, large ones nearly always.

    Args:
        met: by the sequences of the same engine.
    """

    def __init__(self, met: Refusals) -> None:
        self._met = met
        self._counts = met.priors()
        self._wide = False
        self._masked = True  # the next token needs a mask: the first does, and one behind a token that was refused

    @property
    def steps(self) -> int:
        """Tokens that the next dispatch may sample; 0: one, under a mask.

        Where a token is refused with chance p, K steps lose p K / 2 of themselves, and save what K dispatches cost but
        one: the best K is the root of 2 OVERHEAD / p.
        """
        allowed, refused = self._counts[self._wide]
        steps = int(math.sqrt(2 * OVERHEAD * allowed / refused))
        return 0 if self._masked or steps < LEAST else steps

    def is_certain(self, tokens: int) -> bool:
        """Whether so many are so likely to be allowed that the host need not read them before the next are sampled."""
        allowed, refused = self._counts[self._wide]
        return not self._masked and tokens * refused <= CERTAIN * allowed

    def ran(self, *, allowed: int, of: int) -> None:
        """A run sampled so many tokens, of which the first ``allowed`` were."""
        before, refused = self._counts[self._wide]
        self._masked = allowed < of
        self._counts[self._wide] = (MEMORY * before + allowed, MEMORY * refused + self._masked)
        self._met.ran(wide=self._wide, allowed=allowed, refused=self._masked)

    def masked(self, share: float) -> None:
        """A token is sampled under a mask that leaves this share of the vocabulary."""
        self._wide = share >= WIDE
        allowed, refused = self._counts[self._wide]
        self._counts[self._wide] = (allowed, FADING * refused)
        self._masked = False


def num_allowed(matcher: StepMatcher, tokens: Sequence[int]) -> int:
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
