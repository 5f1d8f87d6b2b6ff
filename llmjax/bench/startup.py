"""``llmjax bench startup``: how long an engine takes to start, cold and warm, each time in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llmjax.bench.metrics import Distribution
from llmjax.bench.options import options_of
from llmjax.bench.own_server import changed_settings
from llmjax.bench.report import check_writable, draw_result, write_json
from llmjax.cli.parser import Parser, add_config_flags, add_model, add_settings, configs_of
from llmjax.config import EngineConfig, setting
from llmjax.errors import ConfigError, LLMJaxError, last_error
from llmjax.migration import vllm_bench
from llmjax.settings import settings_of

PERCENTILES = (10, 25, 50, 75, 90, 99)
MEASURED = {
    "startup": "LLM(…)",
    "process": "from the process's start to that",
    "programs": "from LLM(…) to all programs",
}


class StartFailed(LLMJaxError):
    """An engine of the benchmark did not start."""


@dataclass(frozen=True, kw_only=True)
class StartupOptions:
    """The starts; names follow vLLM's benchmark."""

    num_iters_cold: int = setting(3, "starts with nothing compiled before", section="starts")
    num_iters_warmup: int = setting(1, "starts before the warm ones that are not timed")
    num_iters_warm: int = setting(3, "starts that find what one before has compiled")
    output_json: str | None = setting(None, "file for the result as JSON")
    plot: str | None = setting(None, "draw the starts as FILE.png and FILE.svg")
    compare: str | None = setting(None, "draw them beside this result of --output-json, with intervals")

    def __post_init__(self) -> None:
        for name in ("num_iters_cold", "num_iters_warmup", "num_iters_warm"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 0, not {getattr(self, name)}")
        if self.compare is not None and self.plot is None:
            raise ConfigError("--compare draws a picture: give --plot FILE too")
        if not self.num_iters_cold + self.num_iters_warm:
            raise ConfigError("--num-iters-cold and --num-iters-warm: both are 0")


def command_line() -> Parser:
    """The flags of the benchmark."""
    parser = Parser(prog="llmjax bench startup", description="Time starts of an engine, cold and warm.")
    add_model(parser)
    add_settings(parser, settings_of(StartupOptions).values(), section="starts")
    add_config_flags(parser, rows=vllm_bench.OFFLINE)
    return parser


def main(argv: list[str]) -> int:
    """Runs the benchmark and prints its table.

    Raises:
        LLMJaxError: a setting is wrong, or the model cannot be loaded.
    """
    values = command_line().parse(argv)
    options = options_of(StartupOptions, values)
    check_writable(options.output_json, plot=options.plot, compare=options.compare)
    config = configs_of(values, model=values.positional_model).engine
    starts = measure(config, options)
    name = Path(config.model.partition("#")[0]).name
    Console().print(table_of(starts, title=f"{name}: starts, in seconds"))
    if options.output_json is not None:
        write_json(Path(options.output_json), {"benchmark": "startup", "model_id": config.model, **fields_of(starts)})
    if options.plot is not None:
        draw_result(fields_of(starts), title=f"{name}: starts", stem=options.plot, compare=options.compare)
    return 0


def measure(config: EngineConfig, options: StartupOptions) -> dict[str, list[dict[str, float]]]:
    """Seconds of each start, cold ones and warm ones, by what is measured.

    Raises:
        StartFailed: an engine does not start.
    """
    console = Console(stderr=True, highlight=False)
    starts: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for i in range(options.num_iters_cold):
        with tempfile.TemporaryDirectory(prefix="llmjax-bench-") as folder:
            starts["cold"].append(start(config.replace(compilation_cache_dir=folder)))
        console.print(f"cold start {i + 1} of {options.num_iters_cold}: {starts['cold'][-1]['startup']:.2f} s")
    if options.num_iters_warm:
        for i in range(options.num_iters_warmup):
            start(config)
            console.print(f"start {i + 1} of {options.num_iters_warmup} that is not timed")
    for i in range(options.num_iters_warm):
        starts["warm"].append(start(config))
        console.print(f"warm start {i + 1} of {options.num_iters_warm}: {starts['warm'][-1]['startup']:.2f} s")
    return starts


def start(config: EngineConfig) -> dict[str, float]:
    """Seconds of one start in a process of its own.

    Raises:
        StartFailed: the engine does not start.
    """
    order = {"settings": changed_settings(config), "started": time.time()}
    command = [sys.executable, "-m", "llmjax.bench.startup_main"]
    done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True)
    if done.returncode:
        reason, hint = last_error(done.stderr, done.returncode)
        raise StartFailed(f"the engine did not start: {reason}", hint=hint)
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def table_of(starts: dict[str, list[dict[str, float]]], *, title: str) -> Table:
    """Means, medians and the ends of what was measured."""
    table = Table(title=title, title_justify="left")
    for column in ("", "mean", "median", "least", "most"):
        table.add_column(column, justify="right" if column else "left")
    for phase, runs in starts.items():
        for name, label in MEASURED.items():
            if runs:
                seconds = [run[name] for run in runs]
                distribution = _distribution(seconds)
                cells = (distribution.mean, distribution.median, min(seconds), max(seconds))
                table.add_row(f"{phase}: {label}", *(f"{value:.2f}" for value in cells))
        table.add_section()
    return table


def fields_of(starts: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """The JSON fields of vLLM's benchmark for ``startup``, and the same for what else was measured."""
    fields: dict[str, Any] = {}
    for phase, runs in starts.items():
        for name in MEASURED if runs else ():
            seconds = [run[name] for run in runs]
            distribution = _distribution(seconds)
            fields[f"avg_{phase}_{name}_time"] = distribution.mean
            fields[f"{phase}_{name}_times"] = seconds
            fields[f"{phase}_{name}_percentiles"] = {f"{p:g}": value for p, value in distribution.percentiles.items()}
    return fields


def _distribution(seconds: Sequence[float]) -> Distribution:
    distribution = Distribution.of(seconds, PERCENTILES)
    assert distribution is not None  # there is at least one
    return distribution
