"""``llmjax bench sweep serve_workload``: a server under loads from one request at a time to all of them at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmjax.bench.options import options_of
from llmjax.bench.parameters import Parameters
from llmjax.bench.sweep import RunFailed, write_result
from llmjax.bench.sweep_serve import ServeSweepOptions, Sweep
from llmjax.cli.parser import Parser, add_settings
from llmjax.config import check_values, setting
from llmjax.errors import ConfigError
from llmjax.settings import settings_of

RATE, CONCURRENCY = "request_rate", "max_concurrency"
Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class WorkloadSweepOptions(ServeSweepOptions):
    """How the load grows."""

    workload_var: str = setting(
        RATE, "flag of the benchmark that sets the load", choices=(RATE, CONCURRENCY), section="workload"
    )
    workload_iters: int = setting(
        10, "loads to measure: one request at a time, all at once, and evenly between what these two come to"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self)
        if self.workload_iters < 2:
            raise ConfigError(f"--workload-iters must be at least 2, not {self.workload_iters}")


def command_line() -> Parser:
    """The flags of the sweep."""
    parser = Parser(
        prog="llmjax bench sweep serve_workload",
        description="Measure a server under loads from one request at a time to all of them at once.",
    )
    add_settings(parser, settings_of(WorkloadSweepOptions).values(), section="sweep")
    return parser


def main(argv: list[str]) -> int:
    """Runs the sweep and prints its table; the status is 1 if something failed.

    Raises:
        LLMJaxError: a setting is wrong, or a command fails.
    """
    options = options_of(WorkloadSweepOptions, command_line().parse(argv))
    return WorkloadSweep(options).run()


class WorkloadSweep(Sweep):
    """Each combination under all loads."""

    options: WorkloadSweepOptions

    def _combination(self, server: Parameters, bench: Parameters) -> Rows:
        serial = self._load(server, bench, {CONCURRENCY: 1})
        prompts = round(_mean(serial, "completed", "failed")) if serial else 0
        batch = self._load(server, bench, {CONCURRENCY: prompts}) if prompts else []
        if not (serial and batch):
            return serial  # a dry run, or a failure that has been noted
        rows = [*serial, *batch]
        for value in loads_between(self.options.workload_var, serial, batch, count=self.options.workload_iters - 2):
            load = {CONCURRENCY: prompts, self.options.workload_var: value}
            rows += self._load(server, bench, load)
        write_result(self._path(server, bench, "summary"), rows)
        return rows

    def _load(self, server: Parameters, bench: Parameters, load: Mapping[str, Any]) -> Rows:
        """The runs of one load, all at once but for what it says."""
        return super()._combination(server, Parameters({**bench.values, RATE: "inf", **load}))


def loads_between(variable: str, serial: Rows, batch: Rows, *, count: int) -> list[float] | list[int]:
    """Loads evenly between what two runs came to: requests a second, or requests under way at a time.

    Raises:
        RunFailed: a result does not say.
    """
    low, high = (_load_of(variable, rows) for rows in (serial, batch))
    loads = np.linspace(low, high, count + 2)[1:-1]
    if variable == RATE:
        return [round(float(value), 3) for value in loads]
    return sorted({round(value) for value in loads} - {round(low), round(high)})


def _load_of(variable: str, rows: Rows) -> float:
    rate = _mean(rows, "request_throughput")
    # Little's law: as many requests are under way as arrive in the time that one takes.
    return rate if variable == RATE else rate * _mean(rows, "mean_e2el_ms") / 1000


def _mean(rows: Rows, *names: str) -> float:
    """The mean over runs of the sum of these fields."""
    try:
        return float(np.mean([sum(float(row[name]) for name in names) for row in rows]))
    except (KeyError, TypeError, ValueError):
        raise RunFailed(f"a result of the benchmark has no {' or '.join(names)}") from None
