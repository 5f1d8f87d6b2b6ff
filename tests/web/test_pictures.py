"""Pictures on the chat page, with a model that sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from llmjax.config import ServerConfig
from tests.serve import pictures
from tests.serve.conftest import Running, start
from tests.serve.pictures import QUESTION, asked, golden, png, url_of, user
from tests.web.conftest import Visitor

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seeing(compile_cache_dir: str) -> Iterator[Running]:
    running, stop = start(pictures.seeing(compile_cache_dir), ServerConfig(port=0))
    yield running
    running.wait_idle()
    stop()


def test_a_picture_is_seen(visitor_of: Callable[..., Visitor], seeing: Running) -> None:
    picture = png(golden("image0"))
    whole = asked(seeing, user(url_of(picture))).json()
    visitor = visitor_of(seeing.url)
    page = visitor.page
    visitor.open()
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("Temperature temperature").fill("0")
    page.get_by_label("Longest answer max_tokens").evaluate("e => (e.closest('details').open = true)")
    page.get_by_label("Longest answer max_tokens").fill("4")
    page.get_by_role("button", name="Attach pictures or text files").wait_for()
    files = {"name": "golden.png", "mimeType": "image/png", "buffer": picture}
    page.get_by_label("Files to attach").set_input_files([files])
    page.locator(".pending img").wait_for()
    answer = visitor.ask(QUESTION)
    assert page.get_by_role("img", name="golden.png").is_visible()
    (message,) = visitor.bodies()[0]["messages"]
    assert message["content"][0]["image_url"]["url"] == url_of(picture)
    assert answer.locator(".problem").count() == 0
    assert answer.locator(".stats").inner_text().startswith("4 tokens")
    answer.get_by_role("button", name="Edit").click()
    assert page.get_by_label("Edited message").input_value() == whole["choices"][0]["message"]["content"]
