"""The chat page with tools that the server calls: a real tool server, over its standard input and output."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmjax.config import ServerConfig
from tests.serve.conftest import Running, also_serving
from tests.waiting import until
from tests.web.conftest import Visitor
from tests.web.page import axe_finds, button, expect, settings
from tests.web.scripts import SCRIPTS

pytest.importorskip("mcp", reason="needs the SDK of MCP: pip install 'llmjax[mcp]'")
pytestmark = pytest.mark.slow

TOOL_SERVER = Path(__file__).parents[1] / "serve" / "mcp" / "tool_server.py"
RESPONSES = "/v1/responses"
SUNNY = SCRIPTS["sunny"]


@pytest.fixture(scope="module")
def pids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pids") / "pids"


@pytest.fixture(scope="module")
def url(server: Running, tmp_path_factory: pytest.TempPathFactory, pids: Path) -> Iterator[str]:
    config = tmp_path_factory.mktemp("mcp") / "mcp.json"
    command = {"command": sys.executable, "args": [str(TOOL_SERVER), str(pids)]}
    allowed = ["recalls", "waits", "broken"]
    config.write_text(json.dumps({"mcpServers": {"local": {**command, "allowedTools": allowed}}}))
    with also_serving(server, ServerConfig(port=0, mcp_config=str(config), mcp_call_timeout=3600.0)) as url:
        yield url


@pytest.fixture
def notes(pids: Path) -> Iterator[Path]:
    """Where the tool server leaves notes."""
    path = Path(f"{pids}.notes")
    path.write_text("")
    yield path
    path.unlink()


@pytest.fixture
def visitor(visitor_of: Callable[..., Visitor], url: str) -> Visitor:
    visitor = visitor_of(url)
    visitor.open()
    return visitor


def switch_on(visitor: Visitor, *tools: str, asking: bool = False) -> None:
    panel = settings(visitor, "Tools of the server")
    for tool in tools:
        panel.get_by_role("switch", name=re.compile(f"^{tool}")).check()
    box = panel.get_by_label("Ask me before each call")
    expect(box).to_be_checked()
    if not asking:
        box.uncheck()
    button(panel, "Close settings").click()


def call_of(answer: Any, name: str) -> Any:
    return answer.locator("details.call", has_text=f"Calls {name}")


def test_tools_are_off_until_they_are_switched_on(visitor: Visitor) -> None:
    panel = settings(visitor, "Tools of the server")
    switches = panel.get_by_role("switch")
    expect(switches).to_have_count(3)
    assert [one.is_checked() for one in switches.all()] == [False] * 3
    expect(panel.locator(".tool-server")).to_contain_text("What is known of a topic.")
    visitor.ask("[[hello]]")
    assert visitor.bodies(RESPONSES) == [] and "tools" not in visitor.bodies()[0]


def test_the_server_calls_a_tool_and_the_page_shows_it(visitor: Visitor, tmp_path: Path) -> None:
    page = visitor.page
    switch_on(visitor, "recalls")
    answer = visitor.ask("[[lookup]]")
    expect(answer.locator(".markdown")).to_have_text(["I look it up.", SUNNY])
    call = call_of(answer, "recalls")
    expect(call).to_contain_text("of local · done")
    assert call.get_attribute("open") is None
    call.locator("summary").click()
    assert json.loads(call.get_by_label("Arguments").inner_text()) == {"topic": "sunny"}
    expect(call.get_by_label("Result")).to_have_text("It is known: [[sunny]]")
    (body,) = visitor.bodies(RESPONSES)
    tool = {"type": "mcp", "server_label": "local", "allowed_tools": ["recalls"], "require_approval": "never"}
    assert body["tools"] == [tool] and body["store"] is False
    expect(answer.locator(".stats")).to_contain_text("tokens")
    assert page.locator("[role=status]").last.inner_text() == "The answer is complete."
    # Another answer is a branch, and a reload and an export keep both.
    button(answer, "Another answer").click()
    expect(page.locator(".branches")).to_have_text("2 / 2")
    expect(answer.locator(".markdown")).to_have_text(["I look it up.", SUNNY])
    page.reload()
    expect(visitor.answers.locator(".markdown")).to_have_text(["I look it up.", SUNNY])
    visitor.ask("And? [[other]]")
    before = visitor.bodies(RESPONSES)[-1]["input"]
    assert [item.get("type") for item in before] == [None, "message", "mcp_call", "message", None]
    assert before[2]["output"] == "It is known: [[sunny]]"
    page.get_by_role("button", name="Options of [[lookup]]").click()
    with page.expect_download() as waiting:
        button(page, "As Markdown").click()
    assert "Calls `recalls` of local:\n\n```\n" in Path(waiting.value.path()).read_text()
    with page.expect_download() as waiting:
        button(page, "Export").click()
    waiting.value.save_as(tmp_path / "kept.json")
    button(page, "Delete").click()
    button(page, "Delete for good").click()
    expect(page.locator(".list .row")).to_have_count(0)
    page.get_by_label("Files to import").set_input_files(tmp_path / "kept.json")
    page.get_by_role("link", name="[[lookup]]").click()
    expect(call_of(visitor.answers.first, "recalls")).to_contain_text("done")
    expect(visitor.answers.first.locator(".branches")).to_have_text("2 / 2")


def test_a_call_is_allowed_or_denied(visitor: Visitor) -> None:
    page = visitor.page
    switch_on(visitor, "recalls", asking=True)
    answer = visitor.ask("[[lookup]]")
    asked = answer.get_by_role("group", name="The model wants to call recalls")
    assert json.loads(asked.locator("pre").inner_text()) == {"topic": "sunny"}
    assert page.locator("[role=status]").last.inner_text() == "The model asks to call a tool."
    page.reload()  # the question waits
    button(asked, "Allow").click()
    expect(answer.locator(".markdown")).to_have_text(["I look it up.", SUNNY])
    expect(call_of(answer, "recalls")).to_contain_text("done")
    expect(asked).to_have_count(0)
    button(answer, "Another answer").click()
    expect(page.locator(".branches")).to_have_text("2 / 2")
    button(asked, "Deny").click()
    expect(answer.locator("details.call")).to_contain_text("Denied: recalls of local")
    expect(answer).to_have_attribute("aria-busy", "false")
    requests = [item for item in visitor.bodies(RESPONSES)[-1]["input"] if "approval" in item.get("type", "")]
    assert [item["type"] for item in requests] == ["mcp_approval_request", "mcp_approval_response"]
    assert requests[1]["approve"] is False


def test_a_running_call_is_stopped(visitor: Visitor, server: Running, notes: Path) -> None:
    switch_on(visitor, "waits")
    visitor.say("[[patience]]")
    call = call_of(visitor.answers.last, "waits")
    expect(call).to_contain_text("running")
    until(lambda: notes.read_text() == "waits\n")
    button(visitor.page, "Stop").click()
    expect(call).to_contain_text("broken off")
    expect(visitor.answers.last.locator(".stats")).to_contain_text("stopped")
    until(lambda: notes.read_text() == "waits\ncanceled\n")
    server.wait_idle()
    expect(visitor.ask("So? [[hello]]").locator(".markdown")).to_have_text(SCRIPTS["hello"])
    assert [item.get("type") for item in visitor.bodies(RESPONSES)[-1]["input"]] == [None, None]


def test_a_reload_during_a_call(visitor: Visitor, server: Running, notes: Path) -> None:
    switch_on(visitor, "waits")
    visitor.say("[[patience]]")
    expect(call_of(visitor.answers.last, "waits")).to_contain_text("running")
    until(lambda: notes.read_text() == "waits\n")
    visitor.page.wait_for_timeout(1500)  # it is kept once a second
    visitor.page.reload()
    expect(visitor.answers.last).to_contain_text("This answer was interrupted.")
    expect(call_of(visitor.answers.last, "waits")).to_contain_text("broken off")
    until(lambda: notes.read_text() == "waits\ncanceled\n")
    server.wait_idle()


@pytest.mark.parametrize("colors", ["light", "dark"])
def test_axe_finds_nothing(visitor_of: Callable[..., Visitor], url: str, colors: str) -> None:
    visitor = visitor_of(url, color_scheme=colors)
    visitor.open()
    switch_on(visitor, "recalls", asking=True)
    answer = visitor.ask("[[lookup]]")
    assert axe_finds(visitor.page) == {}
    button(answer, "Allow").click()
    expect(answer.locator(".markdown")).to_have_text(["I look it up.", SUNNY])
    call_of(answer, "recalls").locator("summary").click()
    panel = settings(visitor, "Tools of the server")
    expect(panel.get_by_role("switch").first).to_be_visible()
    assert axe_finds(visitor.page) == {}
