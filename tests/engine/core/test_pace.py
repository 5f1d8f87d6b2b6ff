"""The number of steps that a dispatch may take, of tokens in a step with prompt chunks, and the encoder's turns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmjax.engine.core.pace import LEAST_TOKENS, ChunkPace, EncoderPace, Pace


def test_doubles_up_to_the_most() -> None:
    pace = Pace(8, seconds=1.0)
    found = []
    for _ in range(5):
        found.append(pace.steps)
        pace.record(pace.steps, 0.01)
    assert found == [1, 2, 4, 8, 8]


def test_slow_steps_shorten_at_once_and_a_new_batch_starts_again() -> None:
    pace = Pace(8, seconds=1.0)
    for _ in range(3):
        pace.record(pace.steps, 0.01)
    pace.record(8, 2.6)  # 3 of them fit into a second
    assert pace.steps == 3
    pace.record(3, 9.0)
    assert pace.steps == 1
    pace.record(0, 9.0)  # all rows had ended
    assert pace.steps == 1
    pace.record(1, 0.01)
    pace.restart()
    assert pace.steps == 1


@given(st.integers(1, 32), st.lists(st.tuples(st.integers(0, 32), st.floats(0, 10)), max_size=20))
def test_stays_within_bounds(most: int, dispatches: list[tuple[int, float]]) -> None:
    pace = Pace(most, seconds=1.0)
    for steps, seconds in dispatches:
        before = pace.steps
        pace.record(min(steps, before), seconds)
        assert 1 <= pace.steps <= min(most, 2 * before)


def test_slow_steps_take_smaller_chunks() -> None:
    pace = ChunkPace(seconds=1.0)
    assert pace.tokens is None
    pace.record(8, 9.0)  # too small to tell
    assert pace.tokens is None
    pace.record(512, 0.5)
    assert pace.tokens == 1024
    for _ in range(40):
        pace.record(512, 2.0)
    assert pace.tokens == 256
    for _ in range(40):
        pace.record(256, 1000.0)
    assert pace.tokens == LEAST_TOKENS  # prompts go on, however slow
    for _ in range(80):
        pace.record(64, 0.01)
    assert pace.tokens >= 4096


def test_an_encoder_waits_until_steps_have_had_their_share() -> None:
    pace = EncoderPace(share=0.25)

    def step(seconds: float, *, parts: int = 0, steps: int = 1) -> None:
        pace.record(steps=steps, seconds=seconds, parts=parts, decodes=True)

    step(0.1)
    assert pace.goes_on
    pace.begun()
    assert not pace.goes_on  # how long it takes is not known yet
    step(0.3)  # of a step that was sent before
    assert not pace.goes_on
    step(1.15 + 0.2, parts=1, steps=1)  # a step takes 0.15 s now, the part 1.2 s
    for _ in range(3):
        assert not pace.goes_on
        step(1.2)
    assert pace.goes_on


def test_what_an_encoder_took_without_streams_is_not_owed() -> None:
    pace = EncoderPace(share=0.25)
    pace.record(steps=1, seconds=9.0, parts=7, decodes=False)
    assert pace.goes_on


@given(st.lists(st.floats(0.001, 3), min_size=5, max_size=30))
def test_an_encoder_never_has_more_than_its_share(parts: list[float]) -> None:
    """Whatever parts take, and steps that vary little."""
    pace, encoder, steps = EncoderPace(share=0.2), 0.0, 0.0
    pace.record(steps=1, seconds=0.1, parts=0, decodes=True)
    for part in parts:
        assert pace.goes_on
        pace.begun()
        pace.record(steps=1, seconds=0.1 + part, parts=1, decodes=True)
        encoder, steps = encoder + part, steps + 0.1
        while not pace.goes_on:
            pace.record(steps=1, seconds=0.1, parts=0, decodes=True)
            steps += 0.1
    assert encoder <= 0.2 / 0.8 * steps * (1 + 1e-6)
