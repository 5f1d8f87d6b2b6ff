"""``llmjax bench sweep plot_pareto``: tokens a second that a user gets, against those that a device makes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmjax.bench.options import options_of
from llmjax.bench.parameters import path_name
from llmjax.bench.pyplot import check_pyplot, pyplot, save
from llmjax.bench.sweep_rows import Row, number_of, read_rows
from llmjax.cli.parser import Parser, add_settings
from llmjax.config import setting
from llmjax.errors import ConfigError
from llmjax.settings import settings_of

COMMAND = "llmjax bench sweep plot_pareto"
USERS = "max_concurrency"  # the variable with their number, if no other is named
# Whose product is the number of devices, and their short names.
SIZES = (("tensor_parallel_size", "tp"), ("pipeline_parallel_size", "pp"), ("data_parallel_size", "dp"))


@dataclass(frozen=True, kw_only=True)
class ParetoOptions:
    """Where the counts are; names follow vLLM's."""

    user_count_var: str = setting(
        USERS,
        "variable with the number of users (where it is missing: most requests at once)",
        section="plot",
    )
    gpu_count_var: str | None = setting(
        None, "variable with the number of devices (default: the product of the parallel sizes)"
    )
    dry_run: bool = setting(False, "name the figure, and draw none")


@dataclass(frozen=True, order=True)
class Speed:
    """Output tokens a second of a run."""

    per_user: float
    per_device: float


def speeds(rows: Sequence[Row], options: ParetoOptions) -> list[Speed]:
    """The speed of each run whose number of users is known.

    Raises:
        ConfigError: there is none, a run has no throughput, or a count is not a number.
    """
    measured = []
    for row in rows:
        tokens = number_of(row, "output_throughput")
        if tokens is None:
            raise ConfigError("a result has no output_throughput")
        if (users := _first(row, options.user_count_var, "max_concurrent_requests")) is not None:
            measured.append(Speed(tokens / users, tokens / _devices(row, options.gpu_count_var)))
    if not measured:
        raise ConfigError(f"no result has {options.user_count_var!r} or 'max_concurrent_requests'")
    return measured


def frontier(found: Sequence[Speed]) -> list[Speed]:
    """The Pareto frontier: runs that no other run beats in both speeds, the slowest for a user first."""
    best: list[Speed] = []
    for speed in sorted(set(found), reverse=True):
        if not best or speed.per_device > best[-1].per_device:
            best.append(speed)
    return best[::-1]


def _devices(row: Row, name: str | None) -> float:
    count = _first(row, name) if name is not None else None
    return math.prod(_first(row, *names) or 1 for names in SIZES) if count is None else count


def _first(row: Row, *names: str) -> float | None:
    """The first of the variables that is there and not 0."""
    return next((value for name in names if (value := number_of(row, name))), None)


def command_line() -> Parser:
    """The flags of the command."""
    parser = Parser(prog=COMMAND, description="Draw what a user gets against what a device makes.")
    parser.add_argument(
        "folder", metavar="OUTPUT_DIR", help="folder of the results: --output-dir of the sweep, or one in it"
    )
    add_settings(parser, settings_of(ParetoOptions).values(), section="plot")
    return parser


def main(argv: list[str]) -> int:
    """Draws the figure, and says where it is.

    Raises:
        LLMJaxError: a setting is wrong, or there is nothing to draw, or nothing to draw it with.
    """
    values = command_line().parse(argv)
    options, folder = options_of(ParetoOptions, values), Path(values.folder)
    if not options.dry_run:
        check_pyplot(COMMAND)
    rows = read_rows(folder)
    measured = speeds(rows, options)
    # Users and devices counted in another way are another figure.
    counts = [name for name in (options.user_count_var, options.gpu_count_var) if name not in (None, USERS)]
    best, path = frontier(measured), folder / "pareto" / f"{path_name('-'.join(['PARETO', *counts]))}.png"
    if not options.dry_run:
        draw(measured, best, path)
    print(f"{path}: {len(best)} of {len(rows)} runs are at the front")
    return 0


def draw(found: Sequence[Speed], best: Sequence[Speed], path: Path) -> None:
    """Writes all runs and the line of the best ones as a picture.

    Raises:
        ConfigError: it cannot be written.
    """
    picture, ax = pyplot().subplots(layout="constrained")
    ax.scatter([s.per_user for s in found], [s.per_device for s in found], color="0.5", alpha=0.6, label="all runs")
    ax.plot([s.per_user for s in best], [s.per_device for s in best], marker="o", label="Pareto front")
    ax.set_title("What a user gets, and what a device makes", fontsize=11)
    ax.set_xlabel("output throughput for a user (tokens/s)")
    ax.set_ylabel("output throughput of a device (tokens/s)")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
    ax.legend()
    save(picture, path)
