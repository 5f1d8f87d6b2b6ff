"""The tests that need a card, in four processes, with what each did: also those that were begun and did not end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PROCESSES = 4
VARIABLE = "LLMJAX_CARD_TESTS"  # names the file that pytest writes through the functions below
ON_CARD = ("-m", "cuda", "tests")
SMOKE = ("-m", "not slow", "tests/test_step_sizes.py")


def pytest_collection_finish(session: Any) -> None:
    """A hook of pytest that writes what is to be run."""
    for item in session.items:
        _write({"there": item.nodeid})


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    """A hook of pytest, in the process that started the others, that writes that a test has begun."""
    _write({"begun": nodeid})


def pytest_runtest_logreport(report: Any) -> None:
    """A hook of pytest that writes how a test ended."""
    if report.when == "call" or report.outcome != "passed":
        _write({"ended": report.nodeid, "how": report.outcome, "seconds": report.duration})


def _write(entry: dict[str, Any]) -> None:
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a") as file:
            file.write(json.dumps(entry) + "\n")


def run_tests(seconds: float, *, smoke: bool, log: Path) -> Iterator[tuple[str, str]]:
    """Runs them for some seconds at most; yields what to say: names and texts.

    Args:
        smoke: run a few that need no card, in two processes.
        log: gets what pytest prints.
    """
    notes = log.with_suffix(".jsonl")
    notes.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.card_tests", "-q", "-rfE"]
    command += ["-n", str(2 if smoke else PROCESSES), *(SMOKE if smoke else ON_CARD)]
    # Four processes share the card: each takes memory as it needs it.
    environment = {**os.environ, VARIABLE: str(notes), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(seconds)
            yield "pytest", f"ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            yield "pytest", f"was ended after {seconds:.0f} s"
    yield from summary(notes, log)


def summary(notes: Path, log: Path) -> Iterator[tuple[str, str]]:
    """What the notes of a run say: names and texts."""
    there: set[str] = set()
    begun: set[str] = set()
    how: dict[str, str] = {}
    for line in notes.read_text().splitlines() if notes.exists() else []:
        entry = json.loads(line)
        there |= {entry["there"]} if "there" in entry else set()
        begun |= {entry["begun"]} if "begun" in entry else set()
        if "ended" in entry:
            how[entry["ended"]] = entry["how"]
    counts = {outcome: sum(each == outcome for each in how.values()) for outcome in ("passed", "failed", "skipped")}
    yield "tests", ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + f"; log in {log}"
    for name in sorted(name for name, outcome in how.items() if outcome == "failed"):
        yield name, "failed"
    for name in sorted(begun - how.keys()):
        yield name, "begun and not ended"
    left = len(there - begun)
    yield "tests not begun", str(left)
