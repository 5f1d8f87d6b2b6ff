"""The start's table: phases within phases, and when a stream is fast."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import start as module
from benchmarks.start import WINDOW, Phases, Start, Stream, report


def test_a_phase_within_another_counts_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 10.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    phases = Phases(time.time())
    with phases.phase("outer"), phases.phase("inner"):
        pass
    assert (phases.found.wall["outer"], phases.found.wall["inner"]) == (8.0, 2.0)


def test_a_function_is_timed_where_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "this_machine", lambda: "a machine")
    phases = Phases(time.time())
    phases.time("the machine", "benchmarks.start", "this_machine")
    assert module.this_machine() == "a machine"  # type: ignore[comparison-overlap]
    assert "the machine" in phases.found.wall


@pytest.mark.parametrize(
    ("rates", "windows"),
    [
        ([100, 100], 0),
        ([10, 20, 95, 96, 97], 2),
        ([10, 95, 50, 96, 97], 1),  # something else slowed one window down
        ([10, 20], 2),
    ],
)
def test_when_a_stream_is_fast(rates: list[float], windows: int) -> None:
    assert Start(rates=rates, steady=100).full_speed_after() == windows * WINDOW


def test_tokens_are_counted_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def step() -> int:
        nonlocal now
        now += 0.1
        return 5

    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    stream: Any = SimpleNamespace(step=step, used=[], _picked={"a program"})
    assert Stream.rates(stream, lambda: now < 0.8) == pytest.approx([50, 50, 50])
    assert stream.used == [{"a program"}] * 3


def test_the_tables() -> None:
    first = Start(
        wall={"Python": 1.0, "weights": 2.0}, cpu={"Python": 0.5, "weights": 3.0}, rates=[50, 100], steady=100
    )
    first.shares = [0.5, 0.9]
    second = Start(wall={"Python": 2.0, "weights": 1.0}, cpu={"Python": 0.25, "weights": 3.5}, rates=[90], steady=100)
    second.events, second.shares = {"lowered": 2}, [1.0]
    lines = report([first, second]).splitlines()
    assert "| weights | 1.00 | 3.00 |" in lines
    assert "| **all** | **3.00** | **3.50** |" in lines
    assert lines[-2].endswith("| 100 | 0.25 | 50%, 75% | 50%, 70% |")
    assert lines[-1].startswith("| 2 | 0 | 2 | 0 |")
