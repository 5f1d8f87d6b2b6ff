"""Free runs: sampling tokens of a sequence with a grammar without masks, how many at a time, and which are kept.

A sampled token is the one whose logit plus the noise of its position is the largest. If the largest of all tokens is
one that the grammar allows, it is also the largest of those that a mask allows: so it is the token that a step with a
mask would have sampled. If it is not allowed, a step with a mask follows. Top-k, top-p and min-p depend on tokens other
than the sampled one, so requests that use them have no free runs.
"""

from __future__ import annotations

# An example of how the constants below meet. A new sequence in a string of JSON expects, by its prior, 34 tokens that
# are allowed for each one that is not: p = 1/34. The best run is √(0.08 · 34 / 1.5) = 1.3 tokens, so 1, which costs
# 0.08 + (1.5 + 0.5 + 0.2) / 34 = 0.14 of a step for each token: less than the 0.2 of a mask, so it runs alone. After
# 400 more tokens of which none was refused, 1/p is 34,000 and the best run 42 steps: all that the pace allows. With the
# other prior, p = 1/8, a run would cost 0.08 + 2.2 / 8 = 0.36: its tokens have masks.
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmjax.constraints.step_matcher import StepMatcher

MEMORY = 64.0  # memory of a sequence, in tokens of runs
FADING = 0.96  # factor of counted refusals for each token under a mask, so that a run is tried again at some point
MASK = 0.2  # how much more a step under a mask takes than a step of a run, in steps
LAUNCH = 0.08  # cost of a dispatch, in steps
WIDE = 0.5  # a mask that allows this share of the vocabulary is wide, as inside strings
PRIORS = {True: (34.0, 1.0), False: (8.0, 1.0)}  # first counts of allowed and refused tokens
LASTING = 1024.0  # memory of an engine, in tokens of runs
RAREST = 1e-6  # refusals are never counted for less
SUREST = 1024.0  # most allowed tokens for each refused one that a new sequence expects


class Refusals:
    """How often tokens of an engine's sequences were refused, as a first estimate for new sequences: this depends on
    the model as much as on the grammar."""

    def __init__(self) -> None:
        self._counts = dict(PRIORS)

    def priors(self) -> dict[bool, tuple[float, float]]:
        """The counts that a new sequence begins with: tokens that were allowed, and that were refused, after wide masks
        (True) and after others. They are scaled to one refusal, or to the length of a sequence's memory, so that a
        sequence that behaves differently soon outweighs them."""
        priors = {}
        for wide, (allowed, refused) in self._counts.items():
            ratio = min(allowed / refused, SUREST)
            weight = min(1.0, MEMORY / ratio) if ratio else 1.0
            priors[wide] = (weight * ratio, weight)
        return priors

    def ran(self, *, wide: bool, allowed: int, refused: bool) -> None:
        """Notes a run of some sequence."""
        self._counts[wide] = _added(self._counts[wide], allowed, refused, memory=LASTING)


class FreeRun:
    """How far one sequence may run without a mask. Runs after a wide mask and after a narrow one are counted apart:
    small models seldom write the commas and brackets that a grammar needs, large ones nearly always do.

    Args:
        met: the refusals that the sequences of the same engine have met.
    """

    def __init__(self, met: Refusals) -> None:
        self._met = met
        self._counts = met.priors()
        self._wide = False
        self._masked = True  # the next token needs a mask: it is the first, or comes after one that was refused

    @property
    def steps(self) -> int:
        """Tokens that the next dispatch may sample; 0: one, under a mask.

        The host reads a dispatch while the next one runs. So a token that is refused costs what was sampled from there
        on, half of K steps, the whole dispatch after it, and a step under a mask. Where that happens with probability
        p, K steps take LAUNCH / K + p (1.5 K + 0.5 + MASK) of a step for each token: least for K = √(LAUNCH / 1.5 p).
        """
        if self._masked:
            return 0
        allowed, refused = self._counts[self._wide]
        steps = max(round(math.sqrt(LAUNCH * allowed / (1.5 * refused))), 1)
        cost = LAUNCH / steps + refused / allowed * (1.5 * steps + 0.5 + MASK) if allowed else math.inf
        return steps if cost < MASK else 0

    def ran(self, *, allowed: int, of: int) -> None:
        """Notes that a run sampled ``of`` tokens, the first ``allowed`` of which were allowed."""
        self._masked = allowed < of
        self._counts[self._wide] = _added(self._counts[self._wide], allowed, self._masked, memory=MEMORY)
        self._met.ran(wide=self._wide, allowed=allowed, refused=self._masked)

    def masked(self, share: float) -> None:
        """Notes that a token is sampled under a mask that allows this share of the vocabulary."""
        self._wide = share >= WIDE
        allowed, refused = self._counts[self._wide]
        self._counts[self._wide] = (allowed, max(FADING * refused, RAREST))
        self._masked = False


def _added(counts: tuple[float, float], allowed: int, refused: bool, *, memory: float) -> tuple[float, float]:
    weight = math.exp(-(allowed + refused) / memory)  # weight of all earlier counts
    return weight * counts[0] + allowed, max(weight * counts[1] + refused, RAREST)


def num_allowed(matcher: StepMatcher, tokens: Sequence[int]) -> int:
    """How many of some tokens are those that masks would have let through, one after another.

    Args:
        matcher: the matcher in the state before the first of them; it is not changed.
    """
    reader = matcher.deep_copy()
    for count, token in enumerate(tokens):
        # Where only one text can follow, a mask has that text's own token alone.
        forced = reader.compute_ff_tokens()
        if (forced and token != forced[0]) or reader.is_stopped() or not reader.consume_token(token):
            return count
    return len(tokens)
