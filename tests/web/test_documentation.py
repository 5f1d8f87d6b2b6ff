"""The documentation's site in a browser: it asks nobody else for anything, its search works, axe finds nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

PAGES = ("index.html", "quickstart/server.html", "reference/errors.html", "repository/examples/index.html")


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context()
    yield context.new_page()
    context.close()


@pytest.mark.parametrize("path", PAGES)
def test_nothing_is_asked_of_others(documentation: str, page: Any, path: str) -> None:
    asked: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda said: said.type == "error" and complaints.append(said.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"{documentation}/{path}")
    page.wait_for_load_state("networkidle")
    assert len(asked) > 3
    assert [url for url in asked if not url.startswith((documentation, "data:", "blob:"))] == []
    assert complaints == []


def test_search_finds_an_error(documentation: str, page: Any) -> None:
    page.goto(f"{documentation}/index.html")
    page.get_by_role("textbox", name="Search").fill("context_length_exceeded")
    page.locator(".md-search-result__link", has_text="context_length_exceeded").first.wait_for()


@pytest.mark.parametrize("path", PAGES)
def test_axe_finds_nothing(documentation: str, page: Any, path: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.base", reason="needs axe: pip install axe-playwright-python")
    page.goto(f"{documentation}/{path}")
    page.evaluate(Path(axe.__file__).with_name("axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    assert [(one["id"], [node["target"] for node in one["nodes"]][:3]) for one in found] == []
