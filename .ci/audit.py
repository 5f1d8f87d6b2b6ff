"""Looks for known vulnerabilities in the lowest and in the newest packages that pyproject.toml allows: `make audit`.

uv finds out which versions these are, with each set of extras; pip-audit asks PyPI's database about them. What it has
no answer for is looked up in advisories.toml, and said. The exit status is 1 where something is found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from itertools import zip_longest
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[1]
ADVISORIES = Path(__file__).with_name("advisories.toml")
PYPROJECT = ROOT / "pyproject.toml"
# The sets by name: how uv picks versions, and for which Python. The oldest one is pyproject.toml's, and the newest JAX
# is to be had with the newest Python alone.
SETS = {"lowest": ("lowest-direct", "3.11"), "newest": ("highest", "3.14")}


class AuditError(Exception):
    """A tool is missing, or the versions cannot be resolved."""


@dataclass(frozen=True, order=True)
class Pin:
    """A package at one version; names are as PyPI writes them, small and with dashes."""

    name: str
    version: str


@dataclass(frozen=True, order=True)
class Hole:
    """A known vulnerability of a package at one version."""

    pin: Pin
    id: str
    what: str


@dataclass(frozen=True)
class Advisory:
    """What the list says of a package."""

    package: str
    id: str
    affected: tuple[SpecifierSet, ...]
    what: str

    def holds(self, pin: Pin) -> bool:
        version = Version(pin.version)
        return pin.name == self.package and any(versions.contains(version, True) for versions in self.affected)


def read_advisories(path: Path = ADVISORIES) -> tuple[date, list[Advisory]]:
    """The list, and the day to which it is whole."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    advisories = [
        Advisory(row["package"], row["id"], tuple(map(SpecifierSet, row["affected"])), row.get("what", ""))
        for row in content["advisory"]
    ]
    return content["date"], advisories


def listed(pins: Iterable[Pin], advisories: Iterable[Advisory]) -> set[Hole]:
    """The holes that the list knows of."""
    advisories = list(advisories)
    return {Hole(pin, one.id, one.what) for pin in pins for one in advisories if one.holds(pin)}


def resolve(name: str) -> set[Pin]:
    """The pins of one of ``SETS``: of the package alone, and with each of its extras.

    Raises:
        AuditError: uv is missing, or there are no such versions.
    """
    resolution, python = SETS[name]
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header", "--no-build"]
    command += ["--resolution", resolution, "--python-version", python, str(PYPROJECT)]
    # uv has its own name for the index that pip is given.
    index = {"UV_DEFAULT_INDEX": os.environ["PIP_INDEX_URL"]} if "PIP_INDEX_URL" in os.environ else {}
    extras = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    pins: set[Pin] = set()
    for extra in ([], *(["--extra", extra] for extra in extras)):
        done = subprocess.run([*command, *extra], capture_output=True, text=True, env={**os.environ, **index})
        if done.returncode:
            raise AuditError(f"{name} versions {' '.join(extra)}: {done.stderr.strip()}")
        pins |= set(read_pins(done.stdout))
    return pins


def read_pins(text: str) -> Iterator[Pin]:
    """The pins of a requirements file that pins every package."""
    for line in text.splitlines():
        name, equals, version = line.partition(";")[0].strip().partition("==")
        if equals:
            yield Pin(name, version)


def ask_database(pins: Iterable[Pin]) -> tuple[set[Hole], set[Pin]]:
    """What pip-audit finds, and the pins that it has no answer for: all of them where it reaches no database."""
    by_name: dict[str, list[Pin]] = {}
    for pin in sorted(pins):
        by_name.setdefault(pin.name, []).append(pin)
    holes, unknown = set[Hole](), set[Pin]()
    for some in zip_longest(*by_name.values()):  # a requirements file names a package once
        asked = {pin for pin in some if pin is not None}
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "requirements.txt"
            file.write_text("".join(f"{pin.name}=={pin.version}\n" for pin in sorted(asked)))
            command = ["uv", "tool", "run", "--quiet", "pip-audit", "--format", "json", "--progress-spinner", "off"]
            command += ["--no-deps", "--disable-pip", "--requirement", str(file)]
            done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
        found_holes, answered = read_answer(done.stdout)
        holes |= found_holes
        unknown |= asked - answered
    return holes, unknown


def read_answer(text: str) -> tuple[set[Hole], set[Pin]]:
    """What pip-audit's JSON says: holes, and the pins that it knows about; its status is 0 also where it knew none."""
    try:
        rows: list[Mapping[str, object]] = json.loads(text)["dependencies"]
    except (ValueError, KeyError):  # it prints nothing where the database cannot be reached
        return set(), set()
    holes, answered = set[Hole](), set[Pin]()
    for row in rows:
        if "vulns" not in row:
            continue
        pin = Pin(str(row["name"]), str(row["version"]))
        answered.add(pin)
        for hole in row["vulns"]:  # type: ignore[attr-defined]
            fixed = ", ".join(hole["fix_versions"]) or "no version"
            holes.add(Hole(pin, hole["id"], f"fixed by {fixed}"))
    return holes, answered


def main() -> int:
    if subprocess.run([sys.executable, "-m", "uv", "--version"], capture_output=True).returncode:
        raise AuditError("uv is missing: make audit installs it")
    day, advisories = read_advisories()
    pins = {name: resolve(name) for name in SETS}
    every = set().union(*pins.values())
    holes, unknown = ask_database(every)
    if unknown:
        print(f"{len(unknown)} of {len(every)} versions are looked up in {ADVISORIES.name} alone, which is of {day}:")
        print("PyPI's database of vulnerabilities has no answer for them")
    holes |= listed(every, advisories)
    for name, some in pins.items():
        own_holes = sorted(hole for hole in holes if hole.pin in some)
        print(f"{name} versions: {len(some)}, with known vulnerabilities: {len({hole.pin for hole in own_holes})}")
        for hole in own_holes:
            print(f"  {hole.pin.name} {hole.pin.version}: {hole.id}{hole.what and f' ({hole.what})'}")
    return int(bool(holes))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AuditError as error:
        sys.exit(f"audit: {error}")
