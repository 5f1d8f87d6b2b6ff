"""Pictures of benchmark results, as PNG and SVG, and of two results side by side: ``--plot`` and ``--compare``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmjax.bench.pyplot import pyplot, save
from llmjax.errors import ConfigError

ENDINGS = (".png", ".svg")
PANEL = (4.6, 3.4)  # inches
RESAMPLES = 2_000  # of the bootstrap
CONFIDENCE = 0.95
COMPARED = {  # figures with single values in a result's details, and what they are called
    "ttfts": "first token, ms",
    "itls": "gap between tokens, ms",
    "latencies": "request, s",
    "startup": "start, s",
}


@dataclass(frozen=True)
class Steps:
    """A panel with the share of values that are at most x, a line for each name: an empirical distribution."""

    title: str
    x_label: str
    values: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Points:
    """A panel with y over x, a line for each name."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Intervals:
    """A panel with a mean and its interval for each name.

    Attributes:
        values: least, mean and most.
    """

    title: str
    values: Mapping[str, tuple[float, float, float]]


Panel = Steps | Points | Intervals


def draw(panels: Sequence[Panel], *, title: str, stem: str) -> list[Path]:
    """Writes the panels side by side, as STEM.png and STEM.svg, and returns these.

    Args:
        stem: the files' path; an ending of one of theirs is left out.

    Raises:
        ConfigError: a file cannot be written.
    """
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot().subplots(
        rows, columns, squeeze=False, figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained"
    )
    figure.suptitle(title)
    for ax, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(ax, panel)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    path = Path(stem).with_suffix("") if Path(stem).suffix in ENDINGS else Path(stem)
    paths = [path.parent / f"{path.name}{ending}" for ending in ENDINGS]
    for each in paths[:-1]:
        save(figure, each, close=False)
    save(figure, paths[-1])
    return paths


def panels_of(content: Mapping[str, Any]) -> list[Panel]:
    """The panels of one detailed result.

    Args:
        content: its JSON fields, those of all requests among them.
    """
    panels: list[Panel] = []
    ttfts = [1000 * value for value in content.get("ttfts", ()) if value is not None]
    gaps = [1000 * value for values in content.get("itls", ()) for value in values]
    if ttfts:
        panels.append(Steps("first token", "ms", {"": ttfts}))
    if gaps:
        panels.append(Steps("gaps between tokens", "ms", {"": gaps}))
    if starts := content.get("start_times"):
        panels.append(_over_time(starts, content))
    if seconds := content.get("latencies"):
        panels.append(Steps("whole request", "s", {"": seconds}))
    phases = {phase: content[key] for phase in ("cold", "warm") if (key := f"{phase}_startup_times") in content}
    if phases:
        panels.append(Steps("start", "s", phases))
    return panels


def curves(runs: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """The panels of results under different loads: latency and throughput over requests at once.

    Args:
        runs: JSON fields of each.
    """

    def line(x: str, y: str) -> list[tuple[float, float]]:
        return sorted(
            (float(run[x]), float(run[y])) for run in runs if run.get(x) is not None and run.get(y) is not None
        )

    streams = "max_concurrent_requests"
    return [
        Points(
            "latency over load",
            "requests/s",
            "first token, ms",
            {name: line("request_throughput", f"{name}_ttft_ms") for name in ("median", "p99")},
        ),
        Points(
            "gaps over load",
            "requests/s",
            "between tokens, ms",
            {name: line("request_throughput", f"{name}_itl_ms") for name in ("median", "p99")},
        ),
        Points(
            "throughput over streams", "requests at once", "output tokens/s", {"": line(streams, "output_throughput")}
        ),
    ]


def comparison(before: Mapping[str, Any], after: Mapping[str, Any], *, names: tuple[str, str]) -> list[Panel]:
    """The panels that compare two detailed results: means with intervals of 95 %, by resampling the requests.

    Raises:
        ConfigError: they have no figure of single requests in common.
    """
    panels: list[Panel] = []
    for key, title in COMPARED.items():
        both = [single_values(content, key) for content in (before, after)]
        if all(len(values) > 1 for values in both):
            panels.append(Intervals(title, dict(zip(names, map(interval, both), strict=True))))
    if not panels:
        raise ConfigError("the results have no single requests in common", hint="make both with --save-detailed")
    return panels


def single_values(content: Mapping[str, Any], key: str) -> list[float]:
    """One value of each request, or of each start, in the unit of COMPARED."""
    if key == "startup":
        return [*content.get("cold_startup_times", ()), *content.get("warm_startup_times", ())]
    values = content.get(key, ())
    if key == "itls":  # gaps of one request depend on each other, so that its mean is one value
        return [1000 * float(np.mean(gaps)) for gaps in values if gaps]
    return [(1000 if key == "ttfts" else 1) * value for value in values if value is not None]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Least, mean and most of the mean's interval of 95 %: percentiles of the bootstrap (Efron 1979), always the
    same."""
    array = np.asarray(values, np.float64)
    rng = np.random.default_rng(0)
    means = array[rng.integers(0, len(array), (RESAMPLES, len(array)))].mean(axis=1)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(means, (tail, 100 - tail))
    return float(low), float(array.mean()), float(high)


def read_result(path: str) -> dict[str, Any]:
    """A result of ``--output-json``.

    Raises:
        ConfigError: the file cannot be read, or is none.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: is not a result as --output-json writes it")
    return content


def _over_time(starts: Sequence[float], content: Mapping[str, Any]) -> Points:
    first = min(starts)
    ttfts = content.get("ttfts") or [None] * len(starts)
    points = [(start - first, 1000 * ttft) for start, ttft in zip(starts, ttfts, strict=False) if ttft is not None]
    return Points("first token over the run", "sent after, s", "ms", {"": sorted(points)})


def _draw_panel(ax: Any, panel: Panel) -> None:
    ax.set_title(panel.title, fontsize=10)
    match panel:
        case Steps():
            for name, values in panel.values.items():
                ax.ecdf(values, label=name or None)
            ax.set_xlabel(panel.x_label)
            ax.set_ylabel("share")
            ax.set_xlim(left=0)
        case Points():
            for name, points in panel.lines.items():
                ax.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name or None) if points else None
            ax.set_xlabel(panel.x_label)
            ax.set_ylabel(panel.y_label)
            ax.set_ylim(bottom=0)
        case Intervals():
            for name, (low, mean, high) in panel.values.items():
                ax.errorbar([name], [mean], [[mean - low], [high - mean]], fmt="o", capsize=5)
            ax.margins(x=0.4)
            ax.set_ylim(bottom=0)
    if any(ax.get_legend_handles_labels()[1]) and not isinstance(panel, Intervals):
        ax.legend(fontsize=8)
    ax.grid(alpha=0.3)
