"""The constraint of a sequence: which tokens it may sample, which are forced (jump-forward), and why it ended."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from llmjax.constraints.step_matcher import StepMatcher
from llmjax.constraints.thinking import Thinking, ThinkingBudget
from llmjax.engine.free_run import FreeRun, num_allowed
from llmjax.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from llmjax.arrays import Ints

UNBOUNDED = 2**31  # steps that nothing here limits


class Constraint:
    """What a sequence must follow: a grammar, a budget of reasoning tokens, or both. Its state is that after the tokens
    that the host knows.

    A dispatch of a sequence with a grammar samples either one token under a mask, which the host makes once it has read
    the token before, or several without a mask, of which the first allowed ones are kept: see `FreeRun`. Where there is
    no choice, tokens are appended without being sampled (jump-forward decoding). Under a budget alone all tokens are
    kept, but no dispatch goes beyond the budget: there the host has to see whether the sequence still reasons.

    An example: a budget of 3 tokens for an output that begins inside of its reasoning, which ``</t>`` closes.

    * ``steps(0)`` is 3: a dispatch may sample that many. While they are in flight ``steps(3)`` is 0: it has to be read.
    * The host accepts ``I``, ``think`` and ``so``. The budget is used up, and ``forced`` gives the tokens of ``</t>``.
    * These are accepted, too. Without a grammar the constraint is ``over``, and the sequence goes on without it.

    Args:
        matcher: the grammar's matcher, in its initial state; it is copied. None: there is no grammar.
        budget: most reasoning tokens; None: there is no limit.
        jumps: whether forced tokens are appended without being sampled. Where tokens have scores or are counted for
            penalties, each of them is sampled.
        free_run: how far a sequence with a grammar may run without masks; None: it always needs one.

    Attributes:
        rewound: whether the sequence continues from an earlier token than the device knows, so that the device has to
            be told.
    """

    def __init__(
        self,
        matcher: LLMatcher | None,
        *,
        budget: ThinkingBudget | None = None,
        jumps: bool,
        free_run: FreeRun | None = None,
    ) -> None:
        self._matcher = None if matcher is None else StepMatcher(matcher.deep_copy())
        self._thinking = None if budget is None else Thinking(budget)
        self._run = None if matcher is None else free_run
        self._closing: tuple[int, ...] = ()  # what closes the reasoning, as far as it has not been accepted
        self._refused = False
        self.jumps = jumps
        self.rewound = False
        self._end_thinking()

    @property
    def masks(self) -> bool:
        """Whether some of the tokens may have to be sampled under masks."""
        return self._matcher is not None or not self.jumps

    @property
    def runs(self) -> bool:
        """Whether tokens that are sampled without masks have to be checked by `rewind`."""
        return self._run is not None

    @property
    def begins(self) -> bool:
        """Whether the next tokens are forced, so that whatever is sampled before they are appended is not read."""
        return self.jumps and bool(self._closing)

    @property
    def over(self) -> bool:
        """Whether the sequence may write anything from now on."""
        return self._matcher is None and self._thinking is None and not self._closing

    @property
    def needs_mask(self) -> bool:
        """Whether the host has to make a mask for the next token."""
        if self._closing:
            return not self.jumps
        return self._matcher is not None and (self._run is None or not self._run.steps)

    def steps(self, in_flight: int) -> int:
        """Tokens that the device may sample before the host has to check them; 0: none before the steps in flight have
        been read, or one under a mask.

        Args:
            in_flight: tokens that are already sampled, and not accepted yet.
        """
        if self._closing:
            return 0 if in_flight else 1
        steps = UNBOUNDED if self._matcher is None else 0 if self._run is None else self._run.steps
        return steps if self._thinking is None else min(steps, self._thinking.left - in_flight)

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        """Writes a bit for each token into ``size`` bytes at an address. If that takes too much, `error` says so."""
        if self._closing:
            words = np.ctypeslib.as_array((ctypes.c_uint32 * (size // 4)).from_address(pointer))
            words[:] = 0
            words[self._closing[0] // 32] = 1 << self._closing[0] % 32
        elif self._matcher is not None:
            self._matcher.unsafe_compute_mask_ptr(pointer, size)

    def masked(self, mask: Ints, *, vocab_size: int) -> None:
        """Notes that the next token is sampled under a mask: i32 [words]."""
        if self._run is not None and not self._closing:
            # Of integers with a sign NumPy would count the bits of their absolute value.
            self._run.masked(int(np.bitwise_count(mask.view(np.uint32)).sum()) / vocab_size)

    def rewind(self, tokens: tuple[int, ...]) -> int:
        """Checks tokens that were sampled without masks, all of them from finite logits.

        Returns:
            How many of the first ones are allowed. The others leave nothing here, nor on the device once it has been
            told (``rewound``).
        """
        assert self._run is not None and self._matcher is not None
        count = num_allowed(self._matcher, tokens)
        self._run.ran(allowed=count, of=len(tokens))
        self.rewound = self.rewound or count < len(tokens)
        return count

    def begin_step(self) -> None:
        """Notes that a step has ended: the work that the next one may take is counted from 0."""
        if self._matcher is not None:
            self._matcher.begin_step()

    def accept(self, token: int) -> bool:
        """Takes the sequence's next token; False: it is not allowed, or takes too much, as `error` says."""
        if self._closing:
            if token != self._closing[0]:
                self._refused = True
                return False
            self._closing = self._closing[1:]
        elif self._thinking is not None:
            self._thinking.accept(token)
            self._end_thinking()
        return self._matcher is None or self._matcher.consume_token(token)

    def forced(self) -> Iterator[int]:
        """The next tokens as far as there is no choice, as masks would show too; each has to be accepted before the
        next one is asked for."""
        while True:
            while self._closing:
                yield self._closing[0]
            if self._matcher is None:
                return
            for token in self._matcher.compute_ff_tokens():
                yield token
                if self._closing:
                    break
            else:
                return

    @property
    def stopped(self) -> bool:
        """Whether no token can follow."""
        return self._matcher is not None and self._matcher.is_stopped()

    @property
    def error(self) -> InvalidRequest | None:
        """Why the sequence cannot go on; None: it can."""
        if self._refused:
            return InvalidRequest(
                "the reasoning cannot be closed: bad_words, allowed_token_ids or logit_bias forbid its end",
                field="thinking_token_budget",
            )
        if self._matcher is None or not self._matcher.is_error():
            return None
        why = self._matcher.get_error()
        if why.startswith("NoExtension") or "satisfy the grammar" in why:
            message = (
                "nothing that the grammar allows can be sampled: the vocabulary cannot write it, or bad_words, "
                "allowed_token_ids or min_tokens forbid it"
            )
        else:
            message = f"the grammar takes more than a step may: {why.splitlines()[0][:200]}"
        return InvalidRequest(message, field="structured_outputs")

    def _end_thinking(self) -> None:
        if self._thinking is not None and self._thinking.over:
            self._closing, self._thinking = self._thinking.closing, None
