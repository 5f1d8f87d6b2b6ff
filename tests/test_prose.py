"""The project's own words: American spelling, and phrases that a native reader does not stumble on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).parent.parent
FOLDERS = ("kernels", "models", "llmjax", "serve", "configs", "docs", "benchmarks", "tests")
SUFFIXES = {".py", ".md", ".cc", ".h", ".yaml", ".toml"}

# "the text is no number"; but "there is no number", "is no longer" and "is no faster" are English.
IS_NO = re.compile(
    r"(?P<there>\bthere\s+(?:(?:will|would|can|may|must|should)\s+)?)?"
    r"\b(?:is|are|was|were|be|been|being)[\s#/]+no[\s#/]+(?!(?:long|fast|slow|small|larg|bett|high|low)er\b|more\b|less\b|worse\b)\S+",
    re.IGNORECASE,
)
ISE = (
    "quanti tokeni normali optimi speciali organi randomi vectori summari penali initiali seriali recogni minimi maximi"
)
BRITISH = re.compile(
    rf"(?:{'|'.join(ISE.split())})s(?:e|ed|er|ers|es|ing|ations?)(?![a-z])"
    r"|(?:behavi|col|fav|flav|neighb|hon)our|licence|\bcentred?\b|\b(?:model|label|travel)l(?:ed|ing)\b|\bmaths\b",
    re.IGNORECASE,
)


def findings(text: str) -> Iterator[str]:
    """Phrases of a text that should be put differently."""
    for match in IS_NO.finditer(text):
        if not match["there"]:
            yield " ".join(match[0].split())
    for match in BRITISH.finditer(text):
        yield match[0]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the text is no number", ["is no number"]),
        ("# groups that are no\n    # multiple of 16", ["are no # multiple"]),
        ('f"{path}: is no {kind}"', ['is no {kind}"']),
        ("there is no number; There will be no more; it is no longer so, and is no faster", []),
        ("def dequantise(rows): the neighbours of a colour", ["quantise", "neighbour", "colour"]),
        ("quantize, precise, otherwise, noise, an optimist, a task that was cancelled()", []),
    ],
)
def test_what_is_found(text: str, found: list[str]) -> None:
    assert list(findings(text)) == found


def test_own_files() -> None:
    found_files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)
    paths = [path for path in found_files if "node_modules" not in path.parts]
    assert len(paths) > 300
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in [*paths, ROOT / "README.md", ROOT / "pyproject.toml"]
        if path != Path(__file__) and (found := list(findings(path.read_text(encoding="utf-8"))))
    }
    assert not wrong
