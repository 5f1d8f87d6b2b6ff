"""What a benchmark leaves behind: one table on the terminal, one JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llmjax.bench.metrics import Distribution, Result
from llmjax.errors import ConfigError

LATENCIES = {
    "ttft": "time to first token (TTFT), ms",
    "tpot": "time per output token (TPOT), ms",
    "itl": "inter-token latency (ITL), ms",
    "e2el": "end to end, ms",
}


def table_of(result: Result, *, title: str) -> Table:
    """The result as a table: latencies as mean, median and percentiles, then totals."""
    percentiles = sorted({p for found in result.latencies.values() if found for p in found.percentiles})
    table = Table(title=title, title_justify="left")
    for column in ("", "mean", "median", *(f"p{p:g}" for p in percentiles)):
        table.add_column(column, justify="right" if column else "left")
    for name, label in LATENCIES.items():
        table.add_row(label, *_cells(result.latencies[name], percentiles))
    table.add_section()
    work = result.work
    totals: dict[str, str] = {
        "output tokens/s": f"{result.output_throughput:.2f}",
        "total tokens/s": f"{result.total_token_throughput:.2f}",
        "requests/s": f"{result.request_throughput:.3f}",
        "requests completed / failed": f"{result.completed} / {result.failed}",
        "most requests at once": str(result.max_concurrent_requests),
        "tokens in / out": f"{result.total_input_tokens} / {result.total_output_tokens}",
        "duration, s": f"{result.duration:.2f}",
        "host time, ms per step": _number(work.host_ms_per_step if work else None, ".3f"),
        "steps": str(work.steps) if work else "–",
        "compilations during the run": str(work.compilations) if work else "–",
    }
    for label, value in totals.items():
        table.add_row(label, value)
    return table


def publish(result: Result, *, title: str, output_json: str | None, setup: Mapping[str, Any], detailed: bool) -> None:
    """Prints the table and writes the JSON file, if one is asked for.

    Args:
        setup: what was measured, added to the JSON fields of the result.
        detailed: with the figures of every request.

    Raises:
        ConfigError: the file cannot be written.
    """
    Console().print(table_of(result, title=title))
    if output_json is not None:
        write_json(Path(output_json), {**setup, **result.as_json(detailed=detailed)})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an indented JSON file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output-json: cannot write {path}: {error.strerror}") from None


def check_writable(output_json: str | None) -> None:
    """Refuses a result file that could not be written, before the run that would be lost.

    Raises:
        ConfigError: its folder does not exist.
    """
    if output_json is not None and not Path(output_json).absolute().parent.is_dir():
        raise ConfigError(f"--output-json: no folder {Path(output_json).absolute().parent}")


def _cells(found: Distribution | None, percentiles: list[float]) -> list[str]:
    if found is None:
        return ["–"] * (2 + len(percentiles))
    return [f"{value:.2f}" for value in (found.mean, found.median, *(found.percentiles[p] for p in percentiles))]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
