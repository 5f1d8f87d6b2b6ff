"""``llmjax bench sweep startup``: the benchmark of starts, with one combination of flags after another."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from llmjax.bench import startup
from llmjax.bench.options import options_of
from llmjax.bench.parameters import Parameters, path_name, read_parameters
from llmjax.bench.sweep import SweepOptions, read_result, run, write_result, write_table
from llmjax.cli.parser import Parser, add_settings
from llmjax.config import setting
from llmjax.errors import ConfigError
from llmjax.settings import settings_of


@dataclass(frozen=True, kw_only=True)
class StartupSweepOptions(SweepOptions):
    """What is run."""

    startup_cmd: str = setting("llmjax bench startup", "command of the benchmark")
    startup_params: str | None = setting(
        None, "such a file for the benchmark: it runs with each, for each of the server"
    )
    strict_params: bool = setting(False, "flags that the benchmark does not have are an error; else they are left out")
    num_runs: int = setting(1, "runs of each combination")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_runs < 1:
            raise ConfigError("--num-runs must be at least 1")
        if not self.command():
            raise ConfigError("--startup-cmd is empty")

    def command(self) -> list[str]:
        """The benchmark, as the shell splits it."""
        try:
            return shlex.split(self.startup_cmd)
        except ValueError as error:
            raise ConfigError(f"--startup-cmd: {error}") from None


def command_line() -> Parser:
    """The flags of the sweep."""
    parser = Parser(
        prog="llmjax bench sweep startup", description="Time starts with one combination of flags after another."
    )
    add_settings(parser, settings_of(StartupSweepOptions).values(), section="sweep")
    return parser


def main(argv: list[str]) -> int:
    """Runs the sweep.

    Raises:
        LLMJaxError: a setting is wrong, or a command fails.
    """
    options = options_of(StartupSweepOptions, command_line().parse(argv))
    folder, console = options.folder(), Console(stderr=True, highlight=False, soft_wrap=True)
    servers = known(read_parameters(options.serve_params), strict=options.strict_params, console=console)
    starts = known(read_parameters(options.startup_params), strict=options.strict_params, console=console)
    rows: dict[Path, list[dict[str, Any]]] = {}
    for number, server, start in ((i, a, b) for a in servers for b in starts for i in range(options.num_runs)):
        name = "-".join(one.name for one in (server, start) if one.values) or "default"
        path = folder / path_name(name) / f"run={number}.json"
        part = path.with_name(path.name + ".new")
        command = [*start.applied(server.applied(options.command())), "--output-json", str(part)]
        console.print(shlex.join(command))
        if options.dry_run:
            continue
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            run(command, show=options.show_stdout)
            result = read_result(part)
            part.unlink()
            write_result(path, result)
        row = {"run_number": number, **read_result(path), **server.values, **start.values}
        rows.setdefault(path.with_name("summary.json"), []).append(row)
    if not options.dry_run:
        for path, results in rows.items():
            write_result(path, results)
        write_table(folder / "summary.csv", [row for results in rows.values() for row in results])
        console.print(f"results: {folder}")
    return 0


def known(found: Sequence[Parameters], *, strict: bool, console: Console) -> list[Parameters]:
    """Combinations with the flags that the benchmark has.

    Raises:
        ConfigError: one has others, and ``strict``.
    """
    flags = startup.command_line().flags()
    combinations = []
    for one in found:
        named = {key: "--" + key.partition(".")[0].replace("_", "-") for key in one.values}
        others = [key for key, flag in named.items() if flag not in flags]
        if others and strict:
            raise ConfigError(f"{one.name}: llmjax bench startup has no {', '.join(others)}")
        if others:
            console.print(f"note: {one.name}: llmjax bench startup has no {', '.join(others)}")
        combinations.append(
            Parameters({key: one.values[key] for key in one.values if key not in others}, one.given_name)
        )
    return combinations
