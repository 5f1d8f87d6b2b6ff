"""What tests of the page look for on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.web.conftest import Visitor


def button(place: Any, name: str) -> Any:
    return place.get_by_role("button", name=name, exact=True)


def expect(locator: Any) -> Any:
    from playwright.sync_api import expect as expecting

    return expecting(locator)


def settings(visitor: Visitor, group: str = "") -> Any:
    """The settings, opened, with one of their groups."""
    panel = visitor.page.get_by_role("complementary", name="Settings")
    if not panel.is_visible():
        button(visitor.page, "Settings").click()
    if group:
        panel.locator("summary", has_text=group).click()
    return panel


def axe_finds(page: Any) -> dict[str, list[str]]:
    """What hinders people on the page as it is now: the places by the rule; without axe the test is skipped."""
    axe = pytest.importorskip("axe_playwright_python.base", reason="needs axe: pip install axe-playwright-python")
    page.evaluate(Path(axe.__file__).with_name("axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return {one["id"]: [node["html"][:100] for node in one["nodes"]] for one in found}
