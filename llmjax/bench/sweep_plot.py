"""``llmjax bench sweep plot``: curves of a sweep's results, one figure for each combination of some variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from llmjax.bench.axes import axis_label, set_ticks
from llmjax.bench.options import options_of
from llmjax.bench.parameters import path_name
from llmjax.bench.pyplot import check_pyplot, pyplot, save
from llmjax.bench.sweep_rows import (
    Bins,
    Condition,
    Group,
    Row,
    check_known,
    grouped,
    label,
    number_of,
    read_rows,
    value_of,
)
from llmjax.cli.parser import Parser, add_settings
from llmjax.config import check_values, setting
from llmjax.errors import ConfigError
from llmjax.settings import settings_of

COMMAND = "llmjax bench sweep plot"
PANEL = (4.4, 3.4)  # inches
SCALES = ("linear", "log", "symlog", "sqrt")


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """What is drawn; names follow vLLM's."""

    fig_dir: str = setting("", "folder of the figures, in that of the results (default: that itself)", section="plot")
    fig_by: Sequence[str] = setting((), "variables: one figure for each combination of their values")
    row_by: Sequence[str] = setting((), "the same for rows of a figure")
    col_by: Sequence[str] = setting((), "the same for columns")
    curve_by: Sequence[str] = setting((), "the same for curves")
    var_x: str = setting("request_throughput", "variable of the horizontal axis")
    var_y: str = setting("p99_e2el_ms", "variable upwards")
    filter_by: Sequence[str] = setting((), "only runs that meet this: max_concurrency<1000,backend==openai")
    bin_by: Sequence[str] = setting((), "round variables down to multiples: request_throughput%1")
    scale_x: str = setting("linear", "scale of the horizontal axis", choices=SCALES)
    scale_y: str = setting("linear", "scale upwards", choices=SCALES)
    fig_name: str = setting("", "prefix of the files' names (default: what is drawn)")
    dry_run: bool = setting(False, "name the figures, and draw none")

    def __post_init__(self) -> None:
        check_values(self)
        for name in ("fig_by", "row_by", "col_by", "curve_by", "filter_by", "bin_by"):  # "": none
            object.__setattr__(self, name, tuple(part.strip() for part in getattr(self, name) if part.strip()))
        self.conditions, self.bins  # noqa: B018

    @property
    def conditions(self) -> list[Condition]:
        return [Condition.of(text) for text in self.filter_by]

    @property
    def bins(self) -> list[Bins]:
        return [Bins.of(text) for text in self.bin_by]

    @property
    def title(self) -> str:
        """The title of all figures: what is drawn over what."""
        return f"{axis_label(self.var_y)} over {axis_label(self.var_x)}"

    @property
    def name(self) -> str:
        """What names of the files begin with: figures of other variables do not overwrite each other."""
        if self.fig_name:
            return self.fig_name
        groups = {"curve": self.curve_by, "row": self.row_by, "col": self.col_by}
        by = [f"{kind}={','.join(names)}" for kind, names in groups.items() if names]
        scales = [scale for scale in (self.scale_x, self.scale_y) if scale != "linear"]
        return "-".join([self.var_y, "over", self.var_x, *by, *self.filter_by, *self.bin_by, *scales])

    @property
    def variables(self) -> list[str]:
        """All that is read of the results."""
        named = [*self.fig_by, *self.row_by, *self.col_by, *self.curve_by, self.var_x, self.var_y]
        return [*named, *(one.name for one in self.conditions), *(one.name for one in self.bins)]


@dataclass(frozen=True)
class Point:
    """Runs with the same x; of y their mean, and the least and the greatest."""

    x: float | str
    y: float
    least: float
    greatest: float


@dataclass(frozen=True)
class Figure:
    """One picture: panels by row and column, and the curves of each by name."""

    name: str
    title: str
    rows: list[Group]
    columns: list[Group]
    panels: dict[tuple[Group, Group], dict[str, list[Point]]]


def figures(rows: Sequence[Row], options: PlotOptions) -> list[Figure]:
    """All figures.

    Raises:
        ConfigError: no run has a variable, the conditions leave none, or y is not a number.
    """
    check_known(rows, options.variables)
    counted = [row for row in rows if all(condition.holds(row) for condition in options.conditions)]
    if not counted:
        raise ConfigError("--filter-by leaves no result")
    for bins in options.bins:
        counted = [bins.applied(row) for row in counted]
    return [_figure(group, found, options) for group, found in grouped(counted, options.fig_by).items()]


def _figure(group: Group, rows: Sequence[Row], options: PlotOptions) -> Figure:
    panels: dict[tuple[Group, Group], dict[str, list[Point]]] = {}
    for place, found in grouped(rows, [*options.row_by, *options.col_by]).items():
        at = place[: len(options.row_by)], place[len(options.row_by) :]
        curves = grouped(found, options.curve_by)
        panels[at] = {label(name): points(some, x=options.var_x, y=options.var_y) for name, some in curves.items()}
    name = "-".join([options.name, *(f"{key}={value}" for key, value in group)])
    title = "\n".join(filter(None, [options.title, label(group)]))
    return Figure(
        name, title, list(dict.fromkeys(a for a, _ in panels)), list(dict.fromkeys(b for _, b in panels)), panels
    )


def points(rows: Sequence[Row], *, x: str, y: str) -> list[Point]:
    """The points of one curve from left to right, texts in their order. Runs without one of the two are left out.

    Raises:
        ConfigError: y is not a number.
    """
    ys_by_x: dict[Any, list[float]] = {}
    for row in rows:
        at, value = value_of(row, x), number_of(row, y)
        if at is not None and value is not None:
            ys_by_x.setdefault(at if isinstance(at, int | float | str) else str(at), []).append(value)
    if all(isinstance(at, int | float) for at in ys_by_x):
        ys_by_x = dict(sorted(ys_by_x.items()))
    else:
        ys_by_x = {str(at): values for at, values in ys_by_x.items()}
    return [Point(at, fmean(values), min(values), max(values)) for at, values in ys_by_x.items()]


def command_line() -> Parser:
    """The flags of the command."""
    parser = Parser(prog=COMMAND, description="Draw curves of a sweep's results.")
    parser.add_argument(
        "folder", metavar="OUTPUT_DIR", help="folder of the results: --output-dir of the sweep, or one in it"
    )
    add_settings(parser, settings_of(PlotOptions).values(), section="plot")
    return parser


def main(argv: list[str]) -> int:
    """Draws the figures, and says where they are.

    Raises:
        LLMJaxError: a setting is wrong, or there is nothing to draw, or nothing to draw it with.
    """
    values = command_line().parse(argv)
    options, folder = options_of(PlotOptions, values), Path(values.folder)
    if not options.dry_run:
        check_pyplot(COMMAND)
    for figure in figures(read_rows(folder), options):
        path = folder / options.fig_dir / f"{path_name(figure.name)}.png"
        if not options.dry_run:
            draw(figure, options, path)
        print(f"{path}: {len(figure.rows)} x {len(figure.columns)}")
    return 0


def draw(figure: Figure, options: PlotOptions, path: Path) -> None:
    """Writes a figure as a picture. Beside a curve, what lies between the least and the greatest is shaded.

    Raises:
        ConfigError: it cannot be written.
    """
    size = PANEL[0] * len(figure.columns), PANEL[1] * len(figure.rows)
    picture, axes = pyplot().subplots(
        len(figure.rows),
        len(figure.columns),
        squeeze=False,
        figsize=size,
        layout="constrained",
        sharex=True,
        sharey=True,
    )
    picture.suptitle(figure.title, fontsize=11)
    drawn = [point for curves in figure.panels.values() for found in curves.values() for point in found]
    names = list(dict.fromkeys(name for curves in figure.panels.values() for name in curves))
    for (row, column), curves in figure.panels.items():
        ax = axes[figure.rows.index(row), figure.columns.index(column)]
        ax.set_title(label((*row, *column), between="\n"), fontsize=10)
        for name, found in curves.items():
            x, color = [point.x for point in found], f"C{names.index(name)}"
            ax.plot(x, [point.y for point in found], marker="o", markersize=4, color=color, label=name)
            least, greatest = [point.least for point in found], [point.greatest for point in found]
            ax.fill_between(x, least, greatest, color=color, alpha=0.2, linewidth=0)
        _scale(ax.set_xscale, options.scale_x)
        _scale(ax.set_yscale, options.scale_y)
        set_ticks(ax.xaxis, [point.x for point in drawn])
        set_ticks(ax.yaxis, [point.y for point in drawn])
        ax.set_xlabel(axis_label(options.var_x))
        ax.set_ylabel(axis_label(options.var_y))
        ax.grid(alpha=0.3)
        if names != [""]:
            ax.legend(fontsize=8)
    for place in ((row, column) for row in figure.rows for column in figure.columns):
        if place not in figure.panels:
            axes[figure.rows.index(place[0]), figure.columns.index(place[1])].set_visible(False)
    save(picture, path)


def _scale(change: Any, name: str) -> None:
    if name == "sqrt":
        change("function", functions=(lambda x: abs(x) ** 0.5, lambda x: x**2))
    else:
        change(name)
