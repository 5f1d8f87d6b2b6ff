"""Matchers that end an output whose grammar takes too long, with the library's own matcher and a clock that is set."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from llmjax.constraints.compiler import GrammarCompiler
from llmjax.constraints.step_matcher import StepMatcher
from llmjax.sampling.masks import bit_masks
from llmjax.sampling.structured import StructuredOutputsParams
from tests.constraints.test_schema_suite import Bytes

LATE = "it takes more than 500 ms of computing time, again and again"


class Clock:
    """Every call that is timed takes as long as it is told."""

    def __init__(self) -> None:
        self.takes = 0.0
        self._times = self._tell()

    def _tell(self) -> Iterator[float]:
        now = 0.0
        while True:
            yield now
            now += self.takes
            yield now

    def __call__(self) -> float:
        return next(self._times)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def matcher(clock: Clock) -> StepMatcher:
    compiler = GrammarCompiler(Bytes(), vocab_size=257, eos_token_ids=[256])  # type: ignore[arg-type]
    grammar = compiler.grammar(StructuredOutputsParams(regex="(ab)*c"))
    return StepMatcher(compiler.matcher(grammar).deep_copy(), each_step=0.5, seconds=1.0, clock=clock)


def test_it_is_the_librarys(matcher: StepMatcher) -> None:
    (mask,) = np.unpackbits(bit_masks({0: matcher}, rows=1, vocab_size=257).view(np.uint8), axis=1, bitorder="little")
    assert np.flatnonzero(mask).tolist() == [*b"ac"]
    assert matcher.consume_token(ord("a")) and matcher.compute_ff_tokens() == [ord("b")]
    copy = matcher.deep_copy()
    assert copy.consume_tokens([*b"bc"]) and copy.is_stopped() and not copy.is_error()
    assert not matcher.is_stopped() and not matcher.is_error()
    assert not matcher.consume_token(ord("c")) and "satisfy the grammar" in matcher.get_error()


def test_steps_may_take_their_time_each(matcher: StepMatcher, clock: Clock) -> None:
    clock.takes = 0.4
    for token in b"ababab":
        matcher.begin_step()
        assert matcher.consume_token(token) and not matcher.is_error()


def test_what_took_too_long_takes_nothing_more(matcher: StepMatcher, clock: Clock) -> None:
    clock.takes = 0.4
    assert matcher.consume_token(ord("a")) and matcher.consume_token(ord("b"))
    assert not matcher.consume_token(ord("a"))
    assert matcher.is_error() and matcher.get_error() == LATE
    matcher.begin_step()
    assert not matcher.consume_token(ord("b")) and matcher.compute_ff_tokens() == [] and matcher.is_error()
    assert (bit_masks({0: matcher}, rows=1, vocab_size=257) == -1).all()


def test_what_a_copy_takes_counts(matcher: StepMatcher, clock: Clock) -> None:
    copy = matcher.deep_copy()
    clock.takes = 1.1
    assert not copy.consume_token(ord("a")) and copy.is_error()
    assert matcher.is_error() and matcher.get_error() == LATE


def test_what_steps_take_too_long_adds_up(matcher: StepMatcher, clock: Clock) -> None:
    clock.takes = 0.65
    taken = 0
    for token in b"ab" * 10:
        matcher.begin_step()
        if not matcher.consume_token(token):
            break
        taken += 1
    assert taken == 3 and matcher.get_error() == LATE  # 0.65, 0.8 and 0.95 s
