"""The pictures in docs/web.md, made anew: they are left in build/screenshots, to be copied to docs/images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Running
from tests.web.conftest import Visitor
from tests.web.scripts import DESCENT, SUM

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "screenshots"
COLORS = 96  # of a palette, which make a picture of some 30 kB


def shoot(page: Any, name: str) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install pillow")
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"web-{name}.png"
    page.wait_for_timeout(400)  # fonts, colors, formulas
    page.screenshot(path=path)
    with image.open(path) as picture:
        picture.convert("RGB").quantize(COLORS).save(path, optimize=True)
    assert 5_000 < path.stat().st_size < 80_000


def test_pictures(visitor_of: Callable[..., Visitor], server: Running) -> None:
    visitor = visitor_of(server.url)
    page = visitor.page
    page.set_viewport_size({"width": 1180, "height": 760})
    visitor.open()
    visitor.ask("Good morning! [[hello]]")
    page.get_by_role("button", name="New chat").click()
    visitor.ask(SUM)
    page.get_by_role("button", name="New chat").click()
    visitor.ask(DESCENT)
    page.locator(".hljs-keyword").first.wait_for()
    shoot(page, "chat")
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("Ask how likely each token was").evaluate("e => { e.closest('details').open = true; e.click() }")
    page.get_by_role("button", name="Close settings").click()
    page.get_by_role("button", name="New chat").click()
    answer = visitor.ask(SUM)
    answer.locator("summary").click()
    answer.get_by_role("button", name="Probabilities").click()
    answer.locator(".tokens span").nth(9).hover()
    shoot(page, "probabilities")
    page.emulate_media(color_scheme="dark")
    page.goto(f"{visitor.url}/#/engine")
    for _ in range(3):
        page.request.post(f"{visitor.url}/v1/completions", data={"prompt": "[[code]]", "max_tokens": 300})
    page.wait_for_timeout(6000)
    shoot(page, "engine")
    page.set_viewport_size({"width": 390, "height": 760})
    page.goto(f"{visitor.url}/#/chat/")
    page.get_by_role("button", name="Conversations", exact=True).click()
    page.get_by_role("link", name=DESCENT[:20]).click()
    page.locator(".hljs-keyword").first.wait_for()
    page.locator(".messages").evaluate("e => e.scrollTo(0, 0)")
    shoot(page, "phone")
    assert {path.name for path in (ROOT / "docs" / "images").glob("web-*.png")} == {
        path.name for path in FOLDER.glob("web-*.png")
    }
