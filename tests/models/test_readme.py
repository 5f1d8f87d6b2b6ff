"""models/README.md shows how real additions were made: the lines that it shows are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "models" / "README.md").read_text()
HEADER = "+++ b/"


def shown() -> list[tuple[str, list[str]]]:
    """Each file of the diffs, with its lines in order."""
    found: list[tuple[str, list[str]]] = []
    for diff in re.findall(r"```diff\n(.*?)```", README, re.DOTALL):
        for line in diff.splitlines():
            if line.startswith(HEADER):
                found.append((line.removeprefix(HEADER), []))
            else:
                assert line.startswith("+"), line
                found[-1][1].append(line.removeprefix("+"))
    return found


def lacking(text: str, lines: list[str]) -> list[str]:
    """Lines that do not begin one of the text, after those before them."""
    rest, missing = iter(text.splitlines()), []
    for line in lines:
        if not any(own.startswith(line) for own in rest):
            missing.append(line)
            rest = iter(text.splitlines())
    return missing


def test_lines_that_are_lacking() -> None:
    assert lacking("a = 1\n    b = 2\nc = 3\n", ["a =", "c = 3"]) == []
    assert lacking("a = 1\nb = 2\n", ["b = 2", "a = 1", "d"]) == ["a = 1", "d"]


@pytest.mark.parametrize(("path", "lines"), shown(), ids=[path for path, _ in shown()])
def test_the_lines_of_a_diff_are_in_its_file(path: str, lines: list[str]) -> None:
    assert lines and not lacking((ROOT / path).read_text(), lines)


def test_links_and_names() -> None:
    for path in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / "models" / path).exists(), path
    for path in re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|yaml))`", README):
        assert (ROOT / path).exists() or (ROOT / "models" / path).exists(), path
