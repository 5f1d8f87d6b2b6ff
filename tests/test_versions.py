"""Versions are decided in pyproject.toml; what other files say of them is true."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

pytestmark = pytest.mark.jax_api

ROOT = Path(__file__).parent.parent
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OF_JAX = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")


def requirements() -> list[Requirement]:
    """Requirements of the package and of all its extras."""
    project = PYPROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(line) for group in groups for line in group]


def bounds(allowed: SpecifierSet) -> tuple[str, Version]:
    """The oldest version and the first that is too new."""
    by_operator = {one.operator: one.version for one in allowed}
    assert set(by_operator) == {">=", "<"}
    return by_operator[">="], Version(by_operator["<"])


JAX = next(one.specifier for one in requirements() if one.name == "jax" and not one.extras)
OLDEST, TOO_NEW = bounds(JAX)
NEWEST = f"{TOO_NEW.major}.{TOO_NEW.minor - 1}"
PYTHON = PYPROJECT["project"]["requires-python"].removeprefix(">=")


def test_jax_and_its_plugins_have_one_range() -> None:
    """Plug-ins come as extras of JAX, which ask for JAX's own version: in a range a newer one would be taken."""
    found = [one for one in requirements() if one.name in OF_JAX]
    assert {one.name for one in found} == {"jax"}
    assert {"cuda13", "cuda12", "cuda13-local"} <= {extra for one in found for extra in one.extras}
    assert {one.specifier for one in found} == {JAX}


def test_the_environment_keeps_to_it() -> None:
    assert JAX.contains(version("jax"))
    assert sys.version_info >= tuple(map(int, PYTHON.split(".")))


def test_the_oldest_jax_is_tested() -> None:
    lines = (ROOT / ".ci" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    assert {one.name: str(one.specifier) for one in pins} == {"jax": f"=={OLDEST}", "jaxlib": f"=={OLDEST}"}
    assert f"python_of {PYTHON})" in (ROOT / ".ci" / "environments.sh").read_text(encoding="utf-8")


def test_tools_look_for_what_the_oldest_python_has() -> None:
    assert PYPROJECT["tool"]["mypy"]["python_version"] == PYTHON
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{PYTHON.replace('.', '')}"


# What files say of versions; each expression has to be found, and what it finds to be as given.
SAID = [
    ("README.md", r"Python (\d\.\d+) or later", PYTHON),
    ("README.md", r"oldest JAX that is supported, ([\d.]+),", OLDEST),
    ("README.md", r"newest one, up to ([\d.]*\d),", NEWEST),
    ("Makefile", r"Python (\d\.\d+) or later", PYTHON),
    ("Makefile", r"version_info < \((\d, \d+)\)", PYTHON.replace(".", ", ")),
    (".ci/run", r"python3 \((\d\.\d+) or", PYTHON),
    ("kernels/cuda/lowering.py", r"differs between JAX [\d.]+ to ([\d.]+)", NEWEST),
]


@pytest.mark.parametrize(("file", "expression", "expected"), SAID)
def test_what_files_say(file: str, expression: str, expected: str) -> None:
    found = re.findall(expression, (ROOT / file).read_text(encoding="utf-8"))
    assert found and set(found) == {expected}
