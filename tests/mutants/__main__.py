"""Makes faults in a copy of the product, one at a time, and runs the fast tests that must find each.

    python -m tests.mutants [--only TEXT] [--list]

Prints a line for each and a table at the end. The status is 1 if a fault was not found, or its place is not there any
more. C++ kernels are compiled anew for each fault in them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.import_graph import ROOT
from tests.mutants.faults import MUTANTS, Mutant

LINKS = ("kernels", "models", "serve")  # folders beside llmjax/ that are packages of it
KERNELS = "kernels/cpu/src/"
SOONER = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false"}
FAILED = 1  # pytest: tests ran and some failed
LIMIT = 1200  # seconds that the tests of a fault may take


class NotPossible(Exception):
    """A fault cannot be made, or nothing can be said of it."""


def copy_of_tree(folder: Path) -> None:
    """The files of the repository and the library that is compiled of them, in a folder of their own."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in (*filter(None, names), "kernels/cpu/libllmjax_cpu.so"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for name in LINKS:
        link = folder / "llmjax" / name
        if not link.is_symlink():
            link.symlink_to(Path("..") / name)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A module of Python's in the copy."""
    environment = {**os.environ, **SOONER, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )


def first_failure(folder: Path, mutant: Mutant) -> str | None:
    """The test that finds a fault; None: none does.

    Raises:
        NotPossible: the fault has no place in the product, or the tests do not run.
    """
    path = folder / mutant.path
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.before) != 1:
        raise NotPossible(f"{mutant.path} has {mutant.before!r} {text.count(mutant.before)} times")
    tests = [test for test in mutant.tests if (folder / test).exists()]
    if not tests:
        raise NotPossible(f"there are no {', '.join(mutant.tests)}")
    path.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
    try:
        if mutant.path.startswith(KERNELS):
            built = run(folder, "kernels.cpu.build")
            if built.returncode:
                raise NotPossible(built.stderr[-500:])
        done = run(folder, "pytest", "-x", "-m", "not slow", "-p", "no:xdist", *tests)
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode not in (0, FAILED):
        raise NotPossible(done.stdout[-500:])
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failures[0].split(" - ")[0] if done.returncode else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs them all, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="those with this text in what they do or where")
    parser.add_argument("--list", action="store_true", help="say which there are and run none")
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if options.only in f"{mutant.what} {mutant.path}"]
    if options.list:
        print(*(f"{mutant.path}: {mutant.what}" for mutant in chosen), sep="\n")
        return 0
    left = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_of_tree(folder)
        for number, mutant in enumerate(chosen, 1):
            try:
                found = first_failure(folder, mutant)
            except (NotPossible, subprocess.TimeoutExpired) as error:
                found, says = None, f"NOT TRIED: {error}"
            else:
                says = found or "NOT FOUND"
            if found is None:
                left.append(mutant)
            print(f"{number}/{len(chosen)} {mutant.path}: {mutant.what}: {says}", flush=True)
    print(f"{len(chosen) - len(left)} of {len(chosen)} faults are found")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
