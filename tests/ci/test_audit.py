"""The audit of dependencies: which versions it calls vulnerable, and that no floor of ours allows one."""

from __future__ import annotations

import json
import tomllib
from itertools import chain
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.ci.scripts import ROOT, load_script


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    return load_script("audit")


def test_no_floor_allows_a_known_vulnerability(audit: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = chain(project["dependencies"], *project["optional-dependencies"].values())
    floors = {
        audit.Pin(canonicalize_name(requirement.name), bound.version)
        for requirement in map(Requirement, texts)
        for bound in requirement.specifier
        if bound.operator in (">=", "==")
    }
    assert len(floors) > 40
    assert audit.listed(floors, audit.read_advisories()[1]) == set()


@pytest.mark.parametrize(
    ("name", "version", "found"),
    [
        ("starlette", "0.45.0", 3),
        ("starlette", "1.0.1", 2),
        ("starlette", "1.3.0", 1),
        ("starlette", "1.3.1", 0),
        ("protobuf", "5.29.5", 1),
        ("protobuf", "5.29.6", 0),  # an older series with its own fix
        ("protobuf", "6.33.4", 1),
        ("protobuf", "6.33.5", 0),
        ("starlettes", "0.1", 0),
    ],
)
def test_the_list_says_which_versions_are_affected(audit: ModuleType, name: str, version: str, found: int) -> None:
    pin = audit.Pin(name, version)
    holes = audit.listed([pin, audit.Pin("none-of-these", "1")], audit.read_advisories()[1])
    assert len(holes) == found and all(hole.pin == pin for hole in holes)


def test_pins_are_read_from_what_uv_writes(audit: ModuleType) -> None:
    text = "# a comment\nstarlette==1.3.1\nuvloop==0.21.0 ; sys_platform != 'win32'\n\n-e .\n"
    assert list(audit.read_pins(text)) == [audit.Pin("starlette", "1.3.1"), audit.Pin("uvloop", "0.21.0")]


def test_only_what_the_database_answers_counts_as_known(audit: ModuleType) -> None:
    hole = {"id": "PYSEC-1", "fix_versions": ["2", "1.5"], "aliases": [], "description": ""}
    rows = [
        {"name": "a", "version": "1", "vulns": [hole, {**hole, "id": "PYSEC-2", "fix_versions": []}]},
        {"name": "b", "version": "1", "vulns": []},
        {"name": "c", "skip_reason": "Dependency not found on PyPI and could not be audited: c (1)"},
    ]
    holes, answered = audit.read_answer(json.dumps({"dependencies": rows, "fixes": []}))
    a, b = audit.Pin("a", "1"), audit.Pin("b", "1")
    assert holes == {audit.Hole(a, "PYSEC-1", "fixed by 2, 1.5"), audit.Hole(a, "PYSEC-2", "fixed by no version")}
    assert answered == {a, b}
    assert audit.read_answer("") == (set(), set())  # no network
