"""What sweeps have in common: where results go, and how commands are run."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmjax.config import setting
from llmjax.errors import ConfigError, LLMJaxError, last_error


class RunFailed(LLMJaxError):
    """A command of a sweep failed."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Names follow vLLM's sweeps."""

    serve_params: str | None = setting(
        None,
        "JSON file of combinations of flags for the server: a list of objects, or an object of them by name",
        section="sweep",
    )
    output_dir: str = setting("results", "folder of all experiments", aliases=("-o",))
    experiment_name: str | None = setting(None, "folder in it for the results (default: the time)", aliases=("-e",))
    show_stdout: bool = setting(False, "show what the commands write")
    dry_run: bool = setting(False, "print the commands, and run none")
    resume: bool = setting(False, "go on with an experiment: run what has no result yet")

    def __post_init__(self) -> None:
        if self.resume and self.experiment_name is None:
            raise ConfigError("--resume needs the --experiment-name")

    def folder(self) -> Path:
        """The folder of the experiment.

        Raises:
            ConfigError: it is there and should not be, or the other way round.
        """
        name = self.experiment_name or datetime.now(UTC).strftime("%Y%m%d_%H%M%S")
        folder = Path(self.output_dir) / name
        if folder.exists() and not self.resume:
            raise ConfigError(f"{folder} is there already: --resume goes on with it")
        if self.resume and not folder.exists():
            raise ConfigError(f"--resume: there is no {folder}")
        return folder


def run(command: Sequence[str], *, show: bool) -> None:
    """Runs a command to its end.

    Args:
        show: what it writes; else only the last line of a failure is told.

    Raises:
        RunFailed: it cannot be run, or its status is not 0.
    """
    try:
        done = subprocess.run(command, capture_output=not show, text=True, errors="replace")
    except OSError as error:
        raise RunFailed(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        reason, hint = last_error(done.stderr or "", done.returncode)
        raise RunFailed(f"{command[0]}: {reason}", hint=hint)


def read_result(path: Path) -> dict[str, Any]:
    """The result of a run.

    Raises:
        RunFailed: there is none, or it is not a JSON object.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFailed(f"{path}: no result of the run: {error}") from None
    if not isinstance(result, dict):
        raise RunFailed(f"{path}: is not the result of a run")
    return result


def write_result(path: Path, content: Any) -> None:
    """Writes JSON at once or not at all, so that what is there is whole when an experiment goes on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The results as CSV, a line each; values that are lists or objects as JSON."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for row in rows:
            cells = {key: json.dumps(v) if isinstance(v, list | dict) else v for key, v in row.items()}
            writer.writerow(cells)
