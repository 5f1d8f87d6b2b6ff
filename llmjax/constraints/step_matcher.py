"""A matcher that reads one output and fails if that takes too long."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from llguidance import LLMatcher

_T = TypeVar("_T")
STEP_SECONDS = 0.05  # of computing; every step may take this long, for example with thousands of optional properties
MOST_SECONDS = 1.0  # of computing beyond that, in one step or in many


@dataclass
class _Meter:
    seconds: float = 0.0


class StepMatcher:
    """A matcher with a limit on computing time.

    The library limits how much state a step may add, not how long it may search it: the grammar
    ``a: a a | "x" | "xy"`` takes many seconds for a mask after some hundred characters. All sequences wait for a mask,
    so an output that makes them wait too long has to end.

    Args:
        matcher: the library's matcher, which no one else uses.
        each_step: seconds of computing that every step may take.
        seconds: seconds that all steps together may take beyond that; the call that exceeds it still ends normally.
        clock: CPU time of the calling thread.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        each_step: float = STEP_SECONDS,
        seconds: float = MOST_SECONDS,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._matcher = matcher
        self._each_step = each_step
        self._most = seconds
        self._clock = clock
        self._meter = _Meter()

    def begin_step(self) -> None:
        """Begins a step: time above the limit of the last step stays counted. Once it is too much, it stays so."""
        if not self._is_late:
            self._meter.seconds = max(self._meter.seconds - self._each_step, 0.0)

    def deep_copy(self) -> StepMatcher:
        """A copy at the same place; its time counts here too."""
        copy = StepMatcher(
            self._timed(self._matcher.deep_copy), each_step=self._each_step, seconds=self._most, clock=self._clock
        )
        copy._meter = self._meter
        return copy

    def consume_token(self, token: int) -> bool:
        return not self._is_late and self._timed(lambda: self._matcher.consume_token(token)) and not self._is_late

    def consume_tokens(self, tokens: list[int]) -> bool:
        return not self._is_late and self._timed(lambda: self._matcher.consume_tokens(tokens)) and not self._is_late

    def compute_ff_tokens(self) -> list[int]:
        return [] if self._is_late else self._timed(self._matcher.compute_ff_tokens)

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        if not self._is_late:
            self._timed(lambda: self._matcher.unsafe_compute_mask_ptr(pointer, size))

    def is_stopped(self) -> bool:
        return self._matcher.is_stopped()

    def is_error(self) -> bool:
        return self._is_late or self._matcher.is_error()

    def get_error(self) -> str:
        late = f"it takes more than {1e3 * self._each_step:g} ms of computing time, again and again"
        return late if self._is_late else self._matcher.get_error()

    @property
    def _is_late(self) -> bool:
        return self._meter.seconds > self._most

    def _timed(self, work: Callable[[], _T]) -> _T:
        began = self._clock()
        try:
            return work()
        finally:
            self._meter.seconds += self._clock() - began
