"""Tool servers that misbehave: each is one error that says what is wrong, at the start or of the call."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson
import pytest

from llmjax.config import ServerConfig
from llmjax.errors import ConfigError
from llmjax.serve.mcp import client
from llmjax.serve.mcp.results import CONNECTION_CLOSED, TIMED_OUT, cut_to
from llmjax.serve.mcp.servers import ToolServers
from llmjax.serve.protocol.chat import unread_part

pytest.importorskip("mcp", reason="needs the SDK of MCP: pip install 'llmjax[mcp]'")

BAD = Path(__file__).parent / "bad_server.py"


@asynccontextmanager
async def started(folder: Path, server: dict[str, Any], **settings: Any) -> AsyncIterator[ToolServers]:
    path = folder / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {"bad": server}}))
    servers = ToolServers.of(ServerConfig(mcp_config=str(path), **settings))
    await servers.start()
    try:
        yield servers
    finally:
        await servers.close()


def process(what: str, *tools: str) -> dict[str, Any]:
    return {"command": sys.executable, "args": [str(BAD), what], "allowedTools": [*tools] or ["t"]}


@pytest.mark.parametrize(
    ("what", "tools", "words"),
    [
        ("schema", ["t"], r"'t' cannot be offered to a model: its schema is not valid at \$\.properties\.a\.type"),
        ("deep", ["t"], "'t' cannot be offered to a model: `tool.parameters` is nested deeper than 64"),
        ("twice", ["t"], "has two tools called 't'"),
        ("spaced", ["t t"], "without spaces"),
        ("thousand", ["x"], "has no tool 'x'; it has t0, .* and 980 more"),
        ("endless", ["t"], "its list of tools has more than 100 pages"),
    ],
)
async def test_what_is_wrong_at_the_start_is_named(tmp_path: Path, what: str, tools: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=f"mcp_config: the tool server 'bad'.*{words}"):
        async with started(tmp_path, process(what, *tools)):
            pass


async def test_one_that_hangs_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CONNECT_SECONDS", 0.5)
    with pytest.raises(ConfigError, match=r"the tool server 'bad' has not answered for 0\.5 s"):
        async with started(tmp_path, process("silent")):
            pass


async def test_of_a_thousand_tools_those_that_are_allowed_are_there(tmp_path: Path) -> None:
    async with started(tmp_path, process("thousand", "t999", "t7")) as servers:
        assert [tool.name for tool in servers.all[0].tools] == ["t999", "t7"]


@pytest.mark.parametrize(
    ("what", "output"),
    [("controls", "\x1b[31mred\x00\u202e\U0001f600 [[other]]"), ("notes", unread_part("image")), ("chatty", "fine")],
)
async def test_results_are_read_as_they_are(tmp_path: Path, what: str, output: str) -> None:
    async with started(tmp_path, process(what)) as servers:
        found = await servers.all[0].call("t", {})
    assert (found.output, found.error) == (output, None)
    assert orjson.loads(orjson.dumps(found.output)) == output


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("half", TIMED_OUT, "has not answered in time"),  # JSON with half of a character is not read at all
        ("number", TIMED_OUT, "has not answered in time"),
        ("nothing", CONNECTION_CLOSED, "its answer is not one of the protocol: content: Field required"),
        ("dies", CONNECTION_CLOSED, "Connection closed"),
    ],
)
async def test_results_that_are_none_are_an_error(tmp_path: Path, what: str, code: int, words: str) -> None:
    seconds = 3.0 if code == TIMED_OUT else 3600.0
    async with started(tmp_path, process(what), mcp_call_timeout=seconds) as servers:
        for _ in range(2):  # the next call finds a server
            found = await servers.all[0].call("t", {})
            assert found.error is not None and found.output is None
            assert (found.error["type"], found.error["code"]) == ("mcp_protocol_error", code)
            assert words in found.error["message"]


def test_half_characters_of_a_result_become_question_marks() -> None:
    assert cut_to("a\ud83db", most=10) == "a?b"


@contextmanager
def listening(status: int, **headers: str) -> Iterator[tuple[str, list[str]]]:
    """A server that answers everything alike: its address, and what it has been asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(str(self.headers.get("Authorization")))
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_DELETE = do_POST

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/mcp", asked
        server.shutdown()


async def test_a_redirect_to_another_host_is_not_followed(tmp_path: Path) -> None:
    with listening(500) as (elsewhere, asked_there), listening(307, Location=elsewhere) as (url, asked):
        server = {"url": url, "headers": {"Authorization": "Bearer secret"}, "allowedTools": ["t"]}
        with pytest.raises(ConfigError, match="the tool server 'bad' cannot be reached"):
            async with started(tmp_path, server):
                pass
    assert asked and asked[0] == "Bearer secret"
    assert asked_there == []
