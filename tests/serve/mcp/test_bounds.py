"""Where a response with calls of tool servers ends before the model has said all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import pytest

from llmjax.config import ServerConfig
from tests.serve.conftest import Running, also_serving
from tests.serve.mcp.conftest import RESPONSES, answer, body, calls, events_of, kinds
from tests.waiting import until

pytest.importorskip("mcp", reason="needs the SDK of MCP: pip install 'llmjax[mcp]'")


@pytest.fixture(scope="module")
def patient(running: Running, mcp_config: str) -> Iterator[str]:
    """A server that waits for its tools."""
    with also_serving(running, ServerConfig(port=0, mcp_config=mcp_config, mcp_call_timeout=3600.0)) as url:
        yield url


@pytest.fixture
def notes(pids: Path) -> Iterator[Path]:
    """Where the tool server leaves notes."""
    path = Path(f"{pids}.notes")
    path.write_text("")
    yield path
    path.unlink()


def test_a_round_that_does_not_fit_the_context(http: httpx.Client) -> None:
    text = "y" * 800
    events = events_of(http, "fill", input=text)
    assert events[-1]["type"] == "response.incomplete"
    for found in (events[-1]["response"], answer(http, "fill", input=text)):
        assert (found["status"], kinds(found)) == ("incomplete", ["mcp_list_tools", "mcp_call"])
        assert found["incomplete_details"]["reason"] == "max_output_tokens"
        assert "no further round fits the context" in found["incomplete_details"]["message"]
        assert calls(found)[0]["status"] == "completed" and found["usage"]["output_tokens"] > 0


def test_an_approved_call_whose_result_does_not_fit(http: httpx.Client) -> None:
    asked = {"id": "mcpr_1", "server_label": "local", "name": "long", "arguments": '{"n": 1999}'}
    reply = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}
    items = [{"role": "user", "content": "y" * 760}, {"type": "mcp_approval_request", **asked}, reply]
    found = answer(http, "fill", input=items)
    assert (found["status"], kinds(found)) == ("incomplete", ["mcp_list_tools", "mcp_call"])
    assert found["usage"]["total_tokens"] == 0


def test_the_time_of_all_rounds_is_bounded(running: Running, mcp_config: str) -> None:
    config = ServerConfig(port=0, mcp_config=mcp_config, mcp_loop_timeout=0.2)
    with also_serving(running, config) as url, httpx.Client(base_url=url, timeout=None) as http:
        found = events_of(http, "late")[-1]["response"]
    assert (found["status"], kinds(found)) == ("incomplete", ["mcp_list_tools", "mcp_call"])
    assert "--mcp-loop-timeout" in found["incomplete_details"]["message"]
    assert "has not answered in time" in calls(found)[0]["error"]["message"]


def test_a_stream_that_nobody_reads_ends_its_call(running: Running, patient: str, notes: Path) -> None:
    whole = body("late", stream=True)
    with httpx.Client(base_url=patient, timeout=None) as http, http.stream("POST", RESPONSES, json=whole) as response:
        lines = response.iter_lines()  # which closes the connection as soon as nobody holds it
        assert any("mcp_call_arguments.done" in line for line in lines)
        until(lambda: notes.read_text() == "waits\n")
    until(lambda: notes.read_text() == "waits\ncanceled\n")
    running.wait_idle()


def test_a_response_that_nobody_waits_for_ends_its_call(running: Running, patient: str, notes: Path) -> None:
    connection = HTTPConnection(urlsplit(patient).netloc, timeout=None)
    with closing(connection):
        connection.request("POST", RESPONSES, orjson.dumps(body("late")), {"Content-Type": "application/json"})
        until(lambda: notes.read_text() == "waits\n")
    until(lambda: notes.read_text() == "waits\ncanceled\n")
    running.wait_idle()


def test_a_response_in_the_background_is_canceled(patient: str, notes: Path) -> None:
    with httpx.Client(base_url=patient, timeout=None) as http:
        id: Any = answer(http, "late", background=True)["id"]
        until(lambda: notes.read_text() == "waits\n")
        found = http.post(f"{RESPONSES}/{id}/cancel").json()
    assert (found["status"], calls(found)[0]["status"]) == ("cancelled", "incomplete")
    until(lambda: notes.read_text() == "waits\ncanceled\n")
