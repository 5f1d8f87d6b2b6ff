"""What a benchmark leaves behind: one table on the terminal, one JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llmjax.bench.metrics import Distribution, Result
from llmjax.bench.pictures import comparison, draw, panels_of, read_result
from llmjax.bench.pyplot import check_plot
from llmjax.errors import ConfigError

LABELS = {
    "ttft": "time to first token (TTFT), ms",
    "tpot": "time per output token (TPOT), ms",
    "itl": "inter-token latency (ITL), ms",
    "e2el": "end to end, ms",
    "client_queue_time": "wait before it was sent, ms",
    "e2el_including_client_queue": "end to end with that wait, ms",
}


def table_of(result: Result, *, title: str) -> Table:
    """The result as a table: latencies as mean, median and percentiles, then totals."""
    percentiles = sorted(
        {p for distribution in result.latencies.values() if distribution for p in distribution.percentiles}
    )
    table = Table(title=title, title_justify="left")
    for column in ("", "mean", "median", *(f"p{p:g}" for p in percentiles)):
        table.add_column(column, justify="right" if column else "left")
    for name, distribution in result.latencies.items():
        table.add_row(LABELS[name], *_cells(distribution, percentiles))
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
    if result.request_goodput is not None:
        totals["requests/s that met --goodput"] = f"{result.request_goodput:.3f}"
    if result.drafts is not None and result.drafts.drafts:
        totals["draft tokens accepted"] = f"{result.drafts.rate:.1f} % ({result.drafts.length:.2f} tokens a draft)"
    for label, value in totals.items():
        table.add_row(label, value)
    return table


def publish(
    result: Result,
    *,
    title: str,
    output_json: str | None,
    setup: Mapping[str, Any],
    detailed: bool,
    saved: Path | None = None,
    append: bool = False,
    plot: str | None = None,
    compare: str | None = None,
) -> None:
    """Prints the table and writes the JSON files and pictures that are asked for.

    Args:
        setup: what was measured, added to the JSON fields of the result.
        detailed: add the figures of every request.
        saved: another file for the result, as one line.
        append: the line is added to those that this file has.
        plot: path of the pictures, without an ending.
        compare: a result to draw beside this one.

    Raises:
        ConfigError: a file cannot be written.
    """
    Console().print(table_of(result, title=title))
    content = {**setup, **result.as_json(detailed=detailed)}
    if output_json is not None:
        write_json(Path(output_json), content)
    if saved is not None:
        try:
            with saved.open("a" if append else "w", encoding="utf-8") as file:
                file.write(json.dumps(content) + "\n")
        except OSError as error:
            raise ConfigError(f"the result cannot be written to {saved}: {error.strerror}") from None
        Console(stderr=True).print(f"result: {saved}", highlight=False, soft_wrap=True)
    if plot is not None:
        draw_result({**setup, **result.as_json(detailed=True)}, title=title, stem=plot, compare=compare)


def draw_result(content: Mapping[str, Any], *, title: str, stem: str, compare: str | None) -> None:
    """Draws a detailed result, and beside it the comparison with another one.

    Raises:
        ConfigError: a file cannot be read or written, or the two have nothing in common.
    """
    panels = panels_of(content)
    if compare is not None:
        panels += comparison(read_result(compare), content, names=(Path(compare).stem, "this run"))
    if not panels:
        raise ConfigError("--plot: nothing was seen of single requests")
    for path in draw(panels, title=title, stem=stem):
        Console(stderr=True).print(f"picture: {path}", highlight=False, soft_wrap=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an indented JSON file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output-json: cannot write {path}: {error.strerror}") from None


def check_writable(output_json: str | None, *, plot: str | None = None, compare: str | None = None) -> None:
    """Refuses files that could not be written or read, before the run that would be lost.

    Raises:
        ConfigError: a folder does not exist, a result to compare with is none, or matplotlib is not installed.
    """
    check_plot(plot)
    if compare is not None:
        read_result(compare)
    if output_json is not None and not Path(output_json).absolute().parent.is_dir():
        raise ConfigError(f"--output-json: no folder {Path(output_json).absolute().parent}")


def _cells(found: Distribution | None, percentiles: list[float]) -> list[str]:
    if found is None:
        return ["–"] * (2 + len(percentiles))
    return [f"{value:.2f}" for value in (found.mean, found.median, *(found.percentiles[p] for p in percentiles))]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
