"""A server's engine on a thread of its process against one in a process of its own: the same load on both in turn.

    python -m benchmarks.boundary MODEL [--streams 64] [--rounds 2] [flags of llmjax bench serve]

Each measurement is `llmjax bench serve` with a server started for it, and prints its table; the last table compares.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.machine import this_machine
from llmjax.bench import serve
from llmjax.bench.metrics import Distribution, Result
from llmjax.bench.report import check_writable, write_json
from llmjax.errors import ConfigError, LLMJaxError

PLACES = ("thread", "process")  # values of --engine-process
PERCENTILE = 99.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measurement."""

    round: int  # from 1 on
    place: str
    result: Result


def main(argv: Sequence[str]) -> int:
    """Measures and prints; the status is 1 if requests failed.

    Raises:
        LLMJaxError: a setting is wrong, or a server cannot be started.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.boundary",
        usage="%(prog)s MODEL [--streams N] [--rounds N] [flags of llmjax bench serve]",
        allow_abbrev=False,
    )
    parser.add_argument("--streams", type=int, default=64, help="requests under way at once (default: 64)")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each (default: 2)")
    options_here, rest = parser.parse_known_args(argv)
    for name in ("streams", "rounds"):
        if getattr(options_here, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, not {getattr(options_here, name)}")
    plan = plan_of(rest, streams=options_here.streams)
    output_json = plan.report.output_json
    check_writable(output_json)
    plan = dataclasses.replace(plan, report=dataclasses.replace(plan.report, output_json=None))
    runs = []
    for number in range(1, options_here.rounds + 1):
        for place in PLACES:
            here = dataclasses.replace(plan, engine=plan.engine.replace(engine_process=place))
            runs.append(Run(round=number, place=place, result=asyncio.run(serve.run(here))))
    machine, date = this_machine(), datetime.now(UTC).date().isoformat()
    Console(width=160).print(table_of(runs, title=f"{options_here.streams} streams; {machine}; {date}"))
    if output_json is not None:
        results = [{"round": run.round, "engine": run.place, **run.result.as_json()} for run in runs]
        write_json(Path(output_json), {"date": date, "machine": dataclasses.asdict(machine), "runs": results})
    return int(any(run.result.failed for run in runs))


def plan_of(argv: Sequence[str], *, streams: int) -> serve.BenchmarkPlan:
    """What ``llmjax bench serve`` makes of the flags, with as many streams and their p99.

    Raises:
        ConfigError: a flag is wrong, or there is nothing to compare: the server of --base-url is one.
    """
    plan = serve.parse(list(argv))
    if plan.load.url is not None:
        raise ConfigError("--base-url: both servers are started for the comparison")
    percentiles = tuple(sorted({*plan.report.metric_percentiles, PERCENTILE}))
    return dataclasses.replace(
        plan,
        load=dataclasses.replace(plan.load, max_concurrency=streams),
        report=dataclasses.replace(plan.report, metric_percentiles=percentiles),
        engine=plan.engine.replace(max_num_seqs=streams),
    )


def table_of(runs: Sequence[Run], *, title: str) -> Table:
    """One line a measurement."""
    table = Table(title=title, title_justify="left", box=box.MARKDOWN)
    for column in (
        "round",
        "engine",
        "output tokens/s",
        "ITL, ms",
        "p99 ITL, ms",
        "TTFT, ms",
        "p99 TTFT, ms",
        "failed",
    ):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for run in runs:
        latencies = [cell for name in ("itl", "ttft") for cell in _cells(run.result.latencies[name])]
        table.add_row(
            f"{run.round}", run.place, f"{run.result.output_throughput:.1f}", *latencies, f"{run.result.failed}"
        )
    return table


def _cells(found: Distribution | None) -> tuple[str, str]:
    """Mean and 99th percentile."""
    return ("–", "–") if found is None else (f"{found.mean:.2f}", f"{found.percentiles[PERCENTILE]:.2f}")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LLMJaxError as error:
        sys.exit(f"boundary: error: {error}")
