"""The documentation as a site: it builds, reads as GitHub shows it, and fetches nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

from tests.import_graph import ROOT

pytest.importorskip("mkdocs", reason="needs MkDocs: pip install 'llmjax[docs]'")
pytest.importorskip("material", reason="needs Material for MkDocs: pip install 'llmjax[docs]'")

FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it: a link or an anchor that leads nowhere ends that with an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return folder


class Reader(HTMLParser):
    """What a page fetches, and the lines of its text that stand outside of code."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.lines: list[str] = []
        self.code = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in FETCHED and given.get("rel") != "canonical":
            self.fetched.append(given.get(FETCHED[tag]) or "")
        self.code += tag in ("code", "script", "style")

    def handle_endtag(self, tag: str) -> None:
        self.code -= tag in ("code", "script", "style")

    def handle_data(self, data: str) -> None:
        if not self.code:
            self.lines += data.splitlines()


def read(page: Path) -> Reader:
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    return reader


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    fetched = {link for page in pages for link in read(page).fetched}
    assert any(link.endswith(".css") for link in fetched)
    assert {link for link in fetched if re.match(r"(?:\w+:)?//", link)} == set()
    sheets = "".join(sheet.read_text(encoding="utf-8") for sheet in site.rglob("*.css"))
    assert re.findall(r"url\([\"']?(?:\w+:)?//[^)]*", sheets) == []


def as_text(reader: Reader) -> list[str]:
    """Lines of lists and tables that have no empty line before them, which GitHub does not need and the site does."""
    return [line for line in reader.lines if line.lstrip().startswith(("* ", "- ", "| ", "|--"))]


def test_lists_and_tables_are_such_on_the_site(site: Path) -> None:
    assert {page.name: found for page in sorted(site.rglob("*.html")) if (found := as_text(read(page)))} == {}


def test_a_list_that_has_become_text_is_found() -> None:
    reader = Reader()
    reader.feed("<p>So:\n* <b>one</b></p><code>\n* two</code>")
    assert as_text(reader) == ["* "]


def test_files_of_the_repository_are_part_of_the_site(site: Path) -> None:
    assert "llama.cpp" in (site / "repository" / "benchmarks" / "index.html").read_text(encoding="utf-8")
    assert (site / "repository" / "deploy" / "Dockerfile.txt").read_bytes() == (
        ROOT / "deploy" / "Dockerfile"
    ).read_bytes()
    listed = (site / "repository" / "configs.txt").read_text(encoding="utf-8").split()
    assert "configs/smollm2.yaml" in listed


@pytest.mark.parametrize(
    ("text", "page", "expected"),
    [
        ("[a](api.md#keys)", "docs/web.md", "[a](api.md#keys)"),
        ("[a](../README.md#speed)", "docs/web.md", "[a](repository/README.md#speed)"),
        ("[a](../../deploy/Dockerfile)", "docs/quickstart/gpu.md", "[a](../repository/deploy/Dockerfile.txt)"),
        ("[a](../docs/api.md)", "benchmarks/README.md", "[a](../../api.md)"),
        ("[a](#b) [c](https://d/e)", "docs/web.md", "[a](#b) [c](https://d/e)"),
        ("```\n[a](../b.md)\n```", "docs/web.md", "```\n[a](../b.md)\n```"),
    ],
)
def test_links(hooks: ModuleType, text: str, page: str, expected: str) -> None:
    assert hooks.moved(text, page) == expected


@pytest.mark.parametrize("path", ["docs/api.md", "docs/images/web-chat.png", "benchmarks/README.md", "README.md"])
def test_a_place_has_an_origin(hooks: ModuleType, path: str) -> None:
    assert hooks.origin(hooks.place(path)) == path


def test_anchors_are_those_of_github(hooks: ModuleType) -> None:
    assert hooks.anchor("Models & formats: `--model`", "-") == "models--formats---model"
