"""A model that says what a script says, on a server with real tool servers, and requests to it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from llmjax.config import ServerConfig
from llmjax.serve.mcp import client
from tests.serve.scripted import scripted_engine

TOOL_SERVER = Path(__file__).parent / "tool_server.py"
RESPONSES = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS = ["add", "long", "broken", "dies", "hangs", "waits"]
LOCAL = {"type": "mcp", "server_label": "local", "require_approval": "never"}
REMOTE = {**LOCAL, "server_label": "remote", "allowed_tools": ["add"]}
WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}
TIMEOUT, MOST_BYTES, MOST_CALLS = 6.0, 200, 3


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


# The script of a round is the request's, with the number of results that there are by then.
SCRIPTS = {
    "sum0": "I add them. " + call("local__add", a=2, b=3),
    "sum1": "They make five, all told.",
    "two0": call("local__add", a=100, b=11) + call("local__add", a=7000, b=70),
    "two2": "Two sums, then.",
    "far0": call("remote__add", a=41, b=1),
    "far1": "From afar: forty-two.",
    "broken0": call("local__broken"),
    "broken1": "There is nothing to read.",
    "dies0": call("local__dies"),
    "dies1": "Gone, sadly; so be it.",
    "hangs0": call("local__hangs"),
    "hangs1": "Nobody answers me here.",
    "long0": call("local__long", n=900),
    "long1": "Quite a lot of letters.",
    "mixed0": call("local__add", a=1, b=88) + call("get_weather", x=12345),
    "mixed2": "Eighty-nine, and sunny.",
    "wrong0": call("local__add", a="many"),
    "wrong1": "Not a number, it says.",
    "deep0": call("local__add", a=61, b=62),
    "deep1": call("local__add", a=63, b=64),
    "deep2": call("local__add", a=65, b=66),
    "deep3": "Enough of sums by now.",
    "ask0": "May I? " + call("local__add", a=21, b=24),
    "ask1": "With your leave: forty-five.",
    "both0": call("local__add", a=509, b=90) + call("local__long", n=37),
    "both2": "Both are done, I believe.",
    "seek0": call("local__add", a=3111, b=3222) + call("local__add", a=3333, b=3444),
    "seek2": call("local__add", a=4111, b=4222),
    "seek3": "Now that is all of them.",
    "fill0": call("local__long", n=1999),
    "fill1": "It is filled, to the brim.",
    "late0": call("local__waits", seconds=3599),
    "late1": "Never said, for it is late.",
}
TEMPLATE = (
    "{# <tool_call> #}{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}"
    "{% set n = namespace(results=0) %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{% set n.results = n.results + 1 %}{% endif %}"
    "{{ m.role }}|{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{{ '\n' }}{% endfor %}{{ '[[' ~ script ~ n.results ~ ']]' }}"
)


@pytest.fixture(scope="package")
def remote() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, TOOL_SERVER, "http"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.kill()
    process.wait()


@pytest.fixture(scope="package")
def pids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tool server writes its process ids."""
    return tmp_path_factory.mktemp("pids") / "pids"


@pytest.fixture(scope="package")
def mcp_config(tmp_path_factory: pytest.TempPathFactory, remote: str, pids: Path) -> str:
    """The file that names the tool servers."""
    path = tmp_path_factory.mktemp("config") / "mcp.json"
    command = {"command": sys.executable, "args": [str(TOOL_SERVER), str(pids)], "allowedTools": TOOLS}
    servers = {"local": command, "remote": {"type": "http", "url": remote, "allowedTools": ["add"]}}
    path.write_text(json.dumps({"mcpServers": servers}))
    return str(path)


@pytest.fixture(scope="package")
def running(
    tmp_path_factory: pytest.TempPathFactory, start_server: Any, compile_cache_dir: str, mcp_config: str, pids: Path
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("mcp")
    config = scripted_engine(
        folder / "scripted", SCRIPTS, special=[], template=TEMPLATE, context=1024, compile_cache_dir=compile_cache_dir
    )
    settings = ServerConfig(
        port=0,
        mcp_config=mcp_config,
        mcp_call_timeout=TIMEOUT,
        mcp_max_result_bytes=MOST_BYTES,
        mcp_max_calls=MOST_CALLS,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "CONNECT_SECONDS", 3600.0)  # a tool server is a program that has much to import
        server, stop = start_server(config, settings)
        yield server
        stop()
    for pid in pids.read_text().split():  # nothing is left
        assert not Path(f"/proc/{pid}").exists()


@pytest.fixture
def http(running: Any) -> Iterator[httpx.Client]:
    with running.http() as http:
        yield http


def body(script: str, **more: Any) -> dict[str, Any]:
    fields = {"input": "Go on", "tools": [LOCAL], "temperature": 0, "chat_template_kwargs": {"script": script}}
    return {**fields, **more}


def answer(http: httpx.Client, script: str, **more: Any) -> dict[str, Any]:
    response = http.post(RESPONSES, json=body(script, **more))
    assert response.status_code == 200, response.text
    Response.model_validate_json(response.content, strict=True)
    found: dict[str, Any] = response.json()
    assert "x-ignored-fields" not in response.headers
    return found


def events_of(http: httpx.Client, script: str, **more: Any) -> list[dict[str, Any]]:
    with http.stream("POST", RESPONSES, json=body(script, stream=True, **more)) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    for line in lines:
        EVENT.validate_json(line, strict=True)
    return [json.loads(line) for line in lines]


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def calls(response: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for item in response["output"] if item["type"] == "mcp_call"]


def said(response: dict[str, Any]) -> str:
    text: str = response["output"][-1]["content"][0]["text"]
    return text
