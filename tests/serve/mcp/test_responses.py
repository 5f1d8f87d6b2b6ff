"""Responses whose tools the server calls itself: real tool servers, and a model that says what a script says."""

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
from llmjax.errors import ConfigError
from tests.serve.scripted import scripted_engine

pytest.importorskip("mcp", reason="needs the SDK of MCP: pip install 'llmjax[mcp]'")

TOOL_SERVER = Path(__file__).parent / "tool_server.py"
RESPONSES = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS = ["add", "long", "broken", "dies", "hangs"]
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
}
TEMPLATE = (
    "{# <tool_call> #}{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}"
    "{% set n = namespace(results=0) %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{% set n.results = n.results + 1 %}{% endif %}"
    "{{ m.role }}|{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{{ '\n' }}{% endfor %}{{ '[[' ~ script ~ n.results ~ ']]' }}"
)


@pytest.fixture(scope="module")
def remote() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, TOOL_SERVER, "http"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def pids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tool server writes its process ids."""
    return tmp_path_factory.mktemp("pids") / "pids"


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, start_server: Any, compile_cache_dir: str, remote: str, pids: Path
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("mcp")
    config = scripted_engine(
        folder / "scripted", SCRIPTS, special=[], template=TEMPLATE, context=1024, compile_cache_dir=compile_cache_dir
    )
    command = {"command": sys.executable, "args": [str(TOOL_SERVER), str(pids)], "allowedTools": TOOLS}
    servers = {"local": command, "remote": {"type": "http", "url": remote, "allowedTools": ["add"]}}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    settings = ServerConfig(
        port=0,
        mcp_config=str(folder / "mcp.json"),
        mcp_call_timeout=TIMEOUT,
        mcp_max_result_bytes=MOST_BYTES,
        mcp_max_calls=MOST_CALLS,
    )
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


def tokens_of(http: httpx.Client, script: str, items: list[dict[str, Any]]) -> int:
    response = http.post(f"{RESPONSES}/input_tokens", json=body(script, input=items))
    assert response.status_code == 200, response.text
    found: int = response.json()["input_tokens"]
    return found


def test_a_tool_is_called_and_the_model_goes_on(http: httpx.Client) -> None:
    found = answer(http, "sum")
    assert kinds(found) == ["mcp_list_tools", "message", "mcp_call", "message"]
    assert [tool["name"] for tool in found["output"][0]["tools"]] == TOOLS
    assert found["output"][0]["tools"][0]["description"] == "The sum of two numbers."
    (made,) = calls(found)
    assert (made["server_label"], made["name"], made["status"]) == ("local", "add", "completed")
    assert (json.loads(made["arguments"]), made["output"], made["error"]) == ({"a": 2, "b": 3}, "5", None)
    assert (said(found), found["status"]) == (SCRIPTS["sum1"], "completed")
    # What is counted is what the two rounds read, and what a client sends back reads the same.
    user = {"role": "user", "content": "Go on"}
    first, second = tokens_of(http, "sum", [user]), tokens_of(http, "sum", [user, *found["output"][:3]])
    assert found["usage"]["input_tokens"] == first + second
    assert second > first


def test_the_stream_tells_of_each_step(http: httpx.Client) -> None:
    events = events_of(http, "sum")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    told = [name for name in names if "mcp" in name and not name.endswith("delta")]
    assert told == [
        *("mcp_list_tools.in_progress", "mcp_list_tools.completed"),
        *("mcp_call.in_progress", "mcp_call_arguments.done", "mcp_call.completed"),
    ]
    pieces = [event["delta"] for event in events if event["type"] == "response.mcp_call_arguments.delta"]
    last = events[-1]["response"]
    assert "".join(pieces) == calls(last)[0]["arguments"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in done] == [0, 1, 2, 3]
    assert [event["item"] for event in done] == last["output"]
    assert names[-1] == "completed" and said(last) == SCRIPTS["sum1"]


def test_two_calls_of_one_round(http: httpx.Client) -> None:
    found = answer(http, "two")
    assert [made["output"] for made in calls(found)] == ["111", "7070"]
    assert said(found) == SCRIPTS["two2"]


def test_over_http(http: httpx.Client) -> None:
    found = answer(http, "far", tools=[REMOTE])
    assert [made["output"] for made in calls(found)] == ["42"]
    assert said(found) == SCRIPTS["far1"]


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        ("broken", "mcp_tool_execution_error", "no such file"),
        ("wrong", "mcp_tool_execution_error", "integer"),
        ("dies", "mcp_protocol_error", "closed"),
        ("hangs", "mcp_protocol_error", "has not answered in time"),
    ],
)
def test_a_call_that_fails_ends_no_response(http: httpx.Client, script: str, kind: str, words: str) -> None:
    last = events_of(http, script)[-1]["response"]
    (made,) = calls(last)
    assert (made["status"], made["output"], made["error"]["type"]) == ("failed", None, kind)
    assert words in json.dumps(made["error"]).lower()
    assert (last["status"], said(last)) == ("completed", SCRIPTS[f"{script}1"])
    assert calls(answer(http, "sum"))[0]["output"] == "5"  # it is there again


def test_a_long_result_is_cut(http: httpx.Client) -> None:
    (made,) = calls(answer(http, "long"))
    assert made["output"] == "é" * 100 + "\n[cut here: 1800 bytes, of which 200 are shown]"


def test_calls_of_the_client_end_the_response(http: httpx.Client) -> None:
    tools = [LOCAL, WEATHER]
    found = answer(http, "mixed", tools=tools)
    assert kinds(found) == ["mcp_list_tools", "mcp_call", "function_call"]
    assert found["output"][1]["output"] == "89"
    result = {"type": "function_call_output", "call_id": found["output"][2]["call_id"], "output": "sunny"}
    again = answer(http, "mixed", tools=tools, input=[result], previous_response_id=found["id"])
    assert kinds(again) == ["message"]  # the tools are listed already
    assert said(again) == SCRIPTS["mixed2"]


@pytest.mark.parametrize("most", [None, 2])
def test_calls_are_bounded(http: httpx.Client, most: int | None) -> None:
    found = answer(http, "deep", max_tool_calls=most)
    outputs = [made["output"] for made in calls(found)]
    assert outputs == ["123", "127", "131"][: most or MOST_CALLS]
    if most is None:
        assert said(found) == SCRIPTS["deep3"]
    else:  # the model is offered none any more, so that its call is text
        assert "local__add" in said(found)


def test_tokens_of_all_rounds_are_bounded(http: httpx.Client) -> None:
    whole = answer(http, "sum")["usage"]["output_tokens"]
    found = answer(http, "sum", max_output_tokens=whole - 3)
    assert (found["status"], found["usage"]["output_tokens"]) == ("incomplete", whole - 3)
    assert SCRIPTS["sum1"].startswith(said(found)) and calls(found)[0]["output"] == "5"


def test_in_the_background(http: httpx.Client) -> None:
    id = answer(http, "sum", background=True)["id"]
    with http.stream("GET", f"{RESPONSES}/{id}", params={"stream": "true"}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    assert said(json.loads(lines[-1])["response"]) == SCRIPTS["sum1"]


def test_a_choice_of_tools(http: httpx.Client) -> None:
    choice = {"type": "mcp", "server_label": "local", "name": "secret"}
    response = http.post(RESPONSES, json=body("sum", tool_choice=choice))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")
    found = answer(http, "sum", tool_choice="none")
    assert calls(found) == []


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"server_label": "other"}, "server_label", "it has local, remote"),
        ({"server_label": None}, "server_label", "local"),
        ({"server_url": "http://127.0.0.1:1/mcp"}, "server_url", "--mcp-config"),
        ({"headers": {"a": "b"}}, "headers", "operator"),
        ({"allowed_tools": ["secret"]}, "allowed_tools", "'secret' is not allowed"),
        ({"allowed_tools": {"read_only": True}}, "allowed_tools", "list of names"),
        ({"require_approval": "always"}, "require_approval", "never"),
        ({"require_approval": None}, "require_approval", "never"),
        ({"defer_loading": True}, "defer_loading", "not supported"),
    ],
)
def test_what_is_refused(http: httpx.Client, fields: dict[str, Any], param: str, words: str) -> None:
    response = http.post(RESPONSES, json=body("sum", tools=[{**LOCAL, **fields}]))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, f"tools.0.{param}")
    assert words in error["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"command": "/no/such/program"}, "cannot be reached"),
        ({"args": ["-c", "pass"]}, "cannot be reached"),
        ({"allowedTools": ["add", "subtract"]}, "has no tool 'subtract'; it has add, broken"),
    ],
)
async def test_a_server_that_is_not_there(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    from llmjax.serve.mcp.servers import ToolServers

    good = {"command": sys.executable, "args": [str(TOOL_SERVER), str(tmp_path / "pids")], "allowedTools": ["add"]}
    config = tmp_path / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"one": good, "two": {**good, **fields}}}))
    servers = ToolServers.of(ServerConfig(mcp_config=str(config)))
    with pytest.raises(ConfigError, match=words):
        await servers.start()
    started = (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)
