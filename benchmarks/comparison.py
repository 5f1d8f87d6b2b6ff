"""Engines measured in turns, on the same prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from benchmarks.engines.interface import EngineOptions
from benchmarks.engines.process import EngineFailed, EngineProcess
from benchmarks.points import Point
from llmjax.bench.dataset import RandomShape, random_samples

OURS = "llmjax"
AGREEMENT_TOKENS = 32


@dataclass(frozen=True)
class Contender:
    """An engine to start: a key of ``ADAPTERS`` and the interpreter that has it."""

    name: str
    python: str
    options: EngineOptions


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How often, and on what.

    Args:
        rounds: turns of every engine.
        runs: measurements of a point in one turn; the fastest of all turns counts.
        new_tokens: n of a decode point.
        vocab_size: ids of prompts lie below it.
        text: token ids of real text, on which the engines' greedy answers are compared.
    """

    rounds: int
    runs: int
    new_tokens: int
    vocab_size: int
    text: Sequence[int]


@dataclass
class Times:
    """Seconds of one engine at one point: of runs that make one token, and of runs that make 1 + n."""

    one: list[float] = field(default_factory=list)
    more: list[float] = field(default_factory=list)

    def seconds(self, point: Point, new_tokens: int, *, of: Callable[[Iterable[float]], float] = min) -> float | None:
        """What the point measures, out of the fastest runs; None: it was not measured, or noise was larger.

        Args:
            of: what to take of the runs instead, such as the median.
        """
        if not self.one or (point.kind == "decode" and not self.more):
            return None
        seconds = (of(self.more) - of(self.one)) / new_tokens if point.kind == "decode" else of(self.one)
        return seconds if seconds > 0 else None


@dataclass
class Standing:
    """An engine's part in the comparison so far."""

    contender: Contender
    process: EngineProcess | None = None
    answer: list[int] = field(default_factory=list)
    times: dict[Point, Times] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def compare(
    contenders: Sequence[Contender], points: Sequence[Point], rounds: Rounds, *, log: Callable[[str], None]
) -> list[Standing]:
    """Measures everything; only the engine whose turn it is runs meanwhile.

    Args:
        log: told what goes on, a line at a time.

    Raises:
        EngineFailed: llmjax itself failed. A peer that fails is out of the points that it fails at.
    """
    standings = [Standing(contender) for contender in contenders]
    try:
        for standing in standings:
            log(f"{standing.contender.name}: start and warm-up")
            _attempt(standing, lambda standing=standing: _start(standing, points, rounds), log)  # type: ignore[misc]
        for number in range(rounds.rounds):
            for standing in standings:
                log(f"{standing.contender.name}: round {number + 1} of {rounds.rounds}")
                for point in points:
                    _attempt(standing, lambda s=standing, p=point, n=number: _turn(s, p, n, rounds), log)  # type: ignore[misc]
    finally:
        for standing in standings:
            if standing.process is not None:
                standing.process.close()
    return standings


def prompts_of(point: Point, rounds: Rounds, *seed: int) -> list[list[int]]:
    """Random prompts, the same for every engine; other ones for every run, so that no cache can help."""
    shape = RandomShape(input_len=point.prompt, output_len=1, vocab_size=min(10_000, rounds.vocab_size))
    samples = random_samples(point.streams, shape, np.random.default_rng([point.streams, point.prompt, *seed]))
    return [sample.prompt for sample in samples if isinstance(sample.prompt, list)]


def _attempt(standing: Standing, act: Callable[[], None], log: Callable[[str], None]) -> None:
    try:
        act()
    except EngineFailed as error:
        if standing.contender.name == OURS:
            raise
        if str(error) not in standing.failures:
            standing.failures.append(str(error))
        log(str(error))


def _start(standing: Standing, points: Sequence[Point], rounds: Rounds) -> None:
    """Starts the engine, lets it compile, and runs every point once without a clock."""
    contender = standing.contender
    process = EngineProcess(contender.name, python=contender.python, options=contender.options)
    standing.process = process
    with process.awake():
        process.warm_up()
        standing.answer = process.generate([rounds.text], AGREEMENT_TOKENS).tokens[0]
        for point in points:
            if point.kind != "load":
                process.generate(prompts_of(point, rounds), 4 if point.kind == "decode" else 1)


def _turn(standing: Standing, point: Point, number: int, rounds: Rounds) -> None:
    process = standing.process
    if process is None:  # its start failed
        return
    times = standing.times.setdefault(point, Times())
    if point.kind == "load":
        times.one.append(_load(standing.contender, prompts_of(point, rounds, number)))
        return
    with process.awake():
        for run in range(rounds.runs):
            seed = (number, run)
            times.one.append(process.generate(prompts_of(point, rounds, *seed, 0), 1).seconds)
            if point.kind == "decode":
                prompts = prompts_of(point, rounds, *seed, 1)
                times.more.append(process.generate(prompts, 1 + rounds.new_tokens).seconds)


def _load(contender: Contender, prompts: list[list[int]]) -> float:
    """Seconds from the start of a new process to its first token."""
    start = time.perf_counter()
    with closing(EngineProcess(contender.name, python=contender.python, options=contender.options)) as process:
        process.generate(prompts, 1)
        return time.perf_counter() - start
