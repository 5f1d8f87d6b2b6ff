"""The pages tell the truth: files, headings, commands and flags that they name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmjax.cli.commands import COMMANDS
from tests.import_graph import ROOT

pytestmark = pytest.mark.smoke

PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("kernels/*/README.md")]
)
EXAMPLES = {"models/acme2.py"}  # of a family that a reader adds
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Links of a page to files or headings that are not there; those to other hosts are not looked at."""
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


def named_files(page: Path) -> list[str]:
    """Files and folders of the repository that a page names: `` `serve/sse.py` ``, `` `llmjax/engine/` ``."""
    tops = "|".join(sorted(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")))
    return re.findall(rf"`((?:{tops}|engine)/[\w/.-]*(?:\.\w+|/))`", prose(page))


def home(path: str) -> Path:
    """A file as the glossary names it: what lies in ``llmjax/`` may be named without it."""
    return ROOT / path if (ROOT / path).exists() else ROOT / "llmjax" / path


def test_the_glossary_names_what_is_there() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    places = re.findall(r"((?:`[A-Za-z_.]+`, )*`[A-Za-z_.]+`) in `([a-z_/]+\.py)`", glossary)
    assert len(places) > 60
    for names, path in places:
        text = home(path).read_text(encoding="utf-8")
        for name in re.findall(r"`([A-Za-z_]+)[`.]", names):
            assert re.search(rf"^(?:class {name}\b|{name}\b.* = )", text, re.MULTILINE), (name, path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One, two\n[a](page.md#one-two) [b](page.md#two) [c](other.md) [d](https://host/x) [e](#one-two)\n"
    )
    assert broken_links(page) == ["page.md#two", "other.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_pages_name_are_there(page: Path) -> None:
    assert [name for name in named_files(page) if name not in EXAMPLES and not home(name).exists()] == []


def test_files_are_found_in_pages() -> None:
    assert len(named_files(ROOT / "docs" / "tour.md")) > 20


def test_commands_that_pages_name_are_there() -> None:
    commands = {
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"(?:^\$ |`)llmjax ([a-z][a-z-]*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(commands) > 20
    assert {(page, name) for page, name in commands if name not in COMMANDS.commands} == set()
