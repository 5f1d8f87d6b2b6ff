"""Pictures of benchmark results; matplotlib is wanted only where one is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmjax.bench.pyplot import pyplot
from llmjax.errors import ConfigError

PANEL = (4.4, 3.4)  # inches


@dataclass(frozen=True)
class Bars:
    """One panel of bars: a value for each name."""

    title: str
    unit: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Line:
    """One panel with a line: x in powers of two, y from zero."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    y: Sequence[float]


def draw(panels: Sequence[Bars | Line], *, title: str, path: str) -> None:
    """Writes the panels, side by side and at most three in a row, as one picture.

    Raises:
        ConfigError: matplotlib does not know the file's ending.
    """
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot().subplots(
        rows, columns, squeeze=False, figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained"
    )
    figure.suptitle(title)
    names = list(dict.fromkeys(name for panel in panels if isinstance(panel, Bars) for name in panel.values))
    for ax, panel in zip(axes.flat, panels, strict=False):
        ax.set_title(panel.title, fontsize=10)
        if isinstance(panel, Bars):
            bars = ax.bar(list(panel.values), list(panel.values.values()))
            for bar, name in zip(bars, panel.values, strict=True):
                bar.set_color(f"C{names.index(name)}")
            ax.bar_label(bars, fmt=_short, fontsize=8)
            ax.tick_params("x", labelsize=8)
            ax.set_ylabel(panel.unit)
            ax.margins(y=0.15)
        else:
            ax.plot(panel.x, panel.y, marker="o", markersize=4)
            ax.set_xscale("log", base=2)
            ax.set_xticks(panel.x, [f"{x:g}" for x in panel.x], fontsize=8)
            ax.minorticks_off()
            ax.set_ylim(bottom=0)
            ax.set_xlabel(panel.x_label)
            ax.set_ylabel(panel.y_label)
        ax.grid(axis="y", alpha=0.3)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    try:
        figure.savefig(path, dpi=130)
    except ValueError as error:
        raise ConfigError(f"--plot: {str(error).splitlines()[0]}") from None
    pyplot().close(figure)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
