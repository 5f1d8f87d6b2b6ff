"""The table, the JSON file and the picture of a comparison."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.comparison import AGREEMENT_TOKENS, OURS, Standing, Times
from benchmarks.machine import Machine, commit, this_machine
from benchmarks.plot import Bars, draw
from benchmarks.points import Point
from benchmarks.records import Record
from llmjax.bench.report import write_json

# Widths that hold the tables without wrapping, so that they can be pasted wherever the terminal ends.
WIDTH = 160
NO_VERSIONS = ("python", "built for", "weights")  # details of an engine that are none


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What was compared; ``weight_bytes`` of the file are read in a decode step."""

    model: str
    weight_bytes: int
    threads: int
    rounds: int
    runs: int
    new_tokens: int


@dataclass(frozen=True)
class Figure:
    """What one engine reached at one point.

    Attributes:
        seconds: duration of a step, a prefill, …: see ``Point``; from the fastest runs, like the speeds.
        median: the same out of the medians; None: noise was larger.
        tokens_per_second: None where a speed says nothing.
        weight_bytes_per_second: the file's weights over the time of a decode step, whatever form the engine holds
            them in.
    """

    point: Point
    engine: str
    seconds: float
    median: float | None
    tokens_per_second: float | None
    weight_bytes_per_second: float | None


def figures_of(standings: Sequence[Standing], points: Sequence[Point], setup: Setup) -> list[Figure]:
    """All that was measured, by point and then by engine."""
    figures = []
    for point in points:
        for standing in standings:
            times = standing.times.get(point, Times())
            seconds = times.seconds(point, setup.new_tokens)
            if seconds is None:
                continue  # the table says so
            figures.append(
                Figure(
                    point=point,
                    engine=standing.contender.name,
                    seconds=seconds,
                    median=times.seconds(point, setup.new_tokens, of=statistics.median),
                    tokens_per_second=point.tokens / seconds if point.tokens else None,
                    weight_bytes_per_second=setup.weight_bytes / seconds if point.kind == "decode" else None,
                )
            )
    return figures


def best_peer(figures: Sequence[Figure], point: Point) -> Figure | None:
    """The fastest engine at a point that is not llmjax."""
    peers = [figure for figure in figures if figure.point == point and figure.engine != OURS]
    return min(peers, key=lambda figure: figure.seconds, default=None)


def ratio(figures: Sequence[Figure], point: Point) -> float | None:
    """How many times as fast as the best peer llmjax is; None: one of the two is missing."""
    peer = best_peer(figures, point)
    ours = [figure for figure in figures if figure.point == point and figure.engine == OURS]
    return peer.seconds / ours[0].seconds if peer and ours else None


def records_of(
    standings: Sequence[Standing], points: Sequence[Point], setup: Setup, *, model: str, settings: str
) -> list[Record]:
    """The figures as they are kept for this processor; points that llmjax has none of are left out.

    Args:
        model: the weights, in words.
        settings: what differed from the defaults.
    """
    figures = figures_of(standings, points, setup)
    versions = {
        standing.contender.name: ", ".join(
            f"{name} {value}" for name, value in standing.process.details.items() if name not in NO_VERSIONS
        )
        for standing in standings
        if standing.process is not None and standing.contender.name != OURS
    }
    records = []
    for point in points:
        here = {figure.engine: figure for figure in figures if figure.point == point}
        if OURS not in here:
            continue
        medians = [figure.median for name, figure in here.items() if name != OURS and figure.median is not None]
        ours = here[OURS].median
        records.append(
            Record(
                model=model,
                settings=settings,
                point=point.key,
                date=_today(),
                commit=commit(),
                weight_bytes=setup.weight_bytes,
                seconds={name: figure.seconds for name, figure in here.items()},
                by_medians=min(medians) / ours if medians and ours else None,
                versions={name: version for name, version in versions.items() if name in here},
            )
        )
    return records


def agreement(standing: Standing, ours: Standing) -> int:
    """Tokens at the start of the engine's greedy answer to a text that are llmjax's too."""
    pairs = zip(standing.answer, ours.answer, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(standing.answer))


def publish(
    standings: Sequence[Standing], points: Sequence[Point], setup: Setup, *, output_json: str | None, plot: str | None
) -> None:
    """Prints the tables and writes the files that are asked for.

    Raises:
        ConfigError: a file cannot be written.
    """
    figures, machine = figures_of(standings, points, setup), this_machine()
    console = Console(width=WIDTH)
    console.print(
        f"{setup.model}, {setup.weight_bytes / 1e6:.1f} MB of weights; {machine}; {_today()}", highlight=False
    )
    console.print()
    console.print(_figure_table(figures, points, engines=[standing.contender.name for standing in standings]))
    console.print()
    console.print(_engine_table(standings))
    for standing in standings:
        for failure in standing.failures:
            console.print(failure, style="red", highlight=False)
    if output_json is not None:
        write_json(Path(output_json), _as_json(standings, figures, setup, machine))
    if plot is not None:
        draw(_panels(figures, points), title=f"{setup.model} on {machine}", path=plot)


def _figure_table(figures: Sequence[Figure], points: Sequence[Point], *, engines: Sequence[str]) -> Table:
    table = Table(box=box.MARKDOWN)
    table.add_column("point")
    table.add_column("engine")
    for column in ("tok/s", "ms", "median ms", "weights, GB/s", "llmjax relative to it", "by medians"):
        table.add_column(column, justify="right")
    for point in points:
        here = sorted((f for f in figures if f.point == point), key=lambda figure: figure.seconds)
        ours = next((figure for figure in here if figure.engine == OURS), None)
        for figure in here:
            table.add_row(
                point.name,
                figure.engine,
                _number(figure.tokens_per_second),
                _number(figure.seconds * 1e3),
                _number(figure.median and figure.median * 1e3),
                _number(figure.weight_bytes_per_second and figure.weight_bytes_per_second / 1e9),
                f"{figure.seconds / ours.seconds:.2f}×" if ours and figure is not ours else "",
                _times(figure.median, ours.median) if ours and figure is not ours else "",
            )
        for engine in engines:
            if engine not in [figure.engine for figure in here]:
                table.add_row(point.name, engine, "–", "–", "–", "–" if point.kind == "decode" else "", "–", "–")
    return table


def _engine_table(standings: Sequence[Standing]) -> Table:
    table = Table(box=box.MARKDOWN)
    for column in ("engine", f"first of {AGREEMENT_TOKENS} greedy tokens as llmjax's", "versions"):
        table.add_column(column)
    for standing in standings:
        details = standing.process.details if standing.process else {}
        agreed = agreement(standing, standings[0]) if standing.answer else "–"
        table.add_row(standing.contender.name, str(agreed), ", ".join(f"{k} {v}" for k, v in details.items()))
    return table


def _as_json(
    standings: Sequence[Standing], figures: Sequence[Figure], setup: Setup, machine: Machine
) -> dict[str, Any]:
    return {
        "date": _today(),
        "machine": dataclasses.asdict(machine),
        **dataclasses.asdict(setup),
        "engines": {
            standing.contender.name: {
                "details": standing.process.details if standing.process else {},
                "agreement": agreement(standing, standings[0]) if standing.answer else None,
                "failures": standing.failures,
                "seconds": {point.name: dataclasses.asdict(times) for point, times in standing.times.items()},
            }
            for standing in standings
        },
        "figures": [
            {**dataclasses.asdict(figure), "point": figure.point.name, "kind": figure.point.kind} for figure in figures
        ],
        "ratio_to_best_peer": {
            point.name: ratio(figures, point) for point in dict.fromkeys(figure.point for figure in figures)
        },
    }


def _panels(figures: Sequence[Figure], points: Sequence[Point]) -> list[Bars]:
    panels = []
    for point in points:
        here = [figure for figure in figures if figure.point == point]
        if point.kind in ("decode", "prefill"):
            values = {figure.engine: figure.tokens_per_second or 0.0 for figure in here}
            panels.append(Bars(f"{point.name} (more is better)", "tokens/s", values))
        else:
            panels.append(
                Bars(f"{point.name} (less is better)", "s", {figure.engine: figure.seconds for figure in here})
            )
    return panels


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _times(seconds: float | None, ours: float | None) -> str:
    return "" if seconds is None or ours is None else f"{seconds / ours:.2f}×"


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
