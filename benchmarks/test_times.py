"""Where the tests' time goes: the slowest tests and files of a run, or what changed between two.

    python -m benchmarks.test_times RUN.xml [--count 40]
    python -m benchmarks.test_times OLD.xml NEW.xml [--count 40]

Runs are JUnit files, as ``pytest --junitxml`` writes them; ``make test`` leaves one in ``build/tests``. The seconds of
a test include its fixtures, so the first test of a file pays for what the others share. Two tables: tests, and the
files that hold them. Of two runs, both have the seconds of each and the difference, the largest first; what one run
lacks is 0.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

COUNT = 40
WIDTH = 140  # columns of a table where standard output is a file


@dataclass(frozen=True)
class Test:
    """One test of a run, or one file of tests."""

    name: str
    seconds: float
    tests: int = 1


@dataclass(frozen=True)
class Run:
    """What a JUnit file says of a run."""

    tests: Mapping[str, Test]
    files: Mapping[str, Test]

    @property
    def seconds(self) -> float:
        """Seconds of all tests together, whichever processes ran them side by side."""
        return sum(test.seconds for test in self.tests.values())


def read(path: Path) -> Run:
    """Reads a JUnit file.

    Raises:
        ValueError: it is not one, or it holds no test.
    """
    try:
        cases = list(ET.parse(path).iter("testcase"))
        times = [(case.attrib["classname"], case.attrib["name"], float(case.attrib["time"])) for case in cases]
    except (ET.ParseError, KeyError) as error:
        raise ValueError(f"{path} is not a JUnit file: {error}") from error
    if not times:
        raise ValueError(f"{path} holds no tests")
    tests: dict[str, Test] = {}
    files: dict[str, Test] = {}
    for file, name, seconds in times:
        for table, key in ((tests, f"{file}::{name}"), (files, file)):
            before = table.get(key, Test(key, 0.0, 0))
            table[key] = Test(key, before.seconds + seconds, before.tests + 1)
    return Run(tests, files)


def slowest(tests: Mapping[str, Test], count: int) -> list[Test]:
    """Some of the tests or files, the slowest first."""
    return sorted(tests.values(), key=lambda test: (-test.seconds, test.name))[:count]


def changes(old: Mapping[str, Test], new: Mapping[str, Test], count: int) -> list[tuple[str, float, float]]:
    """Names with their seconds in two runs, the largest difference first; what did not change is left out."""
    pairs = [
        (name, old[name].seconds if name in old else 0.0, new[name].seconds if name in new else 0.0)
        for name in sorted(old.keys() | new.keys())
    ]
    moved = [pair for pair in pairs if pair[1] != pair[2]]
    return sorted(moved, key=lambda pair: -abs(pair[2] - pair[1]))[:count]


def table_of_run(tests: Sequence[Test], *, counted: bool) -> Table:
    """A table of tests, or, with how many tests each holds, of files."""
    table = Table(box=box.MARKDOWN)
    table.add_column("file" if counted else "test", overflow="fold")
    for column in ("tests", "s") if counted else ("s",):
        table.add_column(column, justify="right")
    for test in tests:
        table.add_row(test.name, *((str(test.tests),) if counted else ()), f"{test.seconds:.2f}")
    return table


def table_of_changes(kind: str, moved: Sequence[tuple[str, float, float]]) -> Table:
    """A table of what two runs' times differ by."""
    table = Table(box=box.MARKDOWN)
    table.add_column(kind, overflow="fold")
    for column in ("before, s", "after, s", "change, s"):
        table.add_column(column, justify="right")
    for name, before, after in moved:
        table.add_row(name, f"{before:.2f}", f"{after:.2f}", f"{after - before:+.2f}")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.xml", help="one run, or an old one and a new one")
    parser.add_argument("--count", type=int, default=COUNT, help=f"rows of a table (default: {COUNT})")
    options = parser.parse_args(arguments)
    if len(options.runs) > 2:
        parser.error("one run is shown, or two are compared")
    try:
        runs = [read(path) for path in options.runs]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    console = Console(markup=False) if sys.stdout.isatty() else Console(markup=False, width=WIDTH)
    new = runs[-1]
    if len(runs) == 1:
        tests, files = slowest(new.tests, options.count), slowest(new.files, options.count)
        console.print(f"{len(new.tests)} tests in {len(new.files)} files take {new.seconds:.0f} s in all; the slowest:")
        console.print(table_of_run(tests, counted=False))
        console.print(table_of_run(files, counted=True))
        return 0
    old = runs[0]
    console.print(f"{len(old.tests)} tests took {old.seconds:.0f} s, {len(new.tests)} take {new.seconds:.0f} s")
    console.print(table_of_changes("test", changes(old.tests, new.tests, options.count)))
    console.print(table_of_changes("file", changes(old.files, new.files, options.count)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
