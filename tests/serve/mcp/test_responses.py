"""Responses whose tools the server calls itself: real tool servers, and a model that says what a script says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmjax.config import ServerConfig
from llmjax.errors import ConfigError
from tests.serve.mcp.conftest import (
    LOCAL,
    MOST_CALLS,
    REMOTE,
    RESPONSES,
    SCRIPTS,
    TOOL_SERVER,
    TOOLS,
    WEATHER,
    answer,
    body,
    calls,
    events_of,
    kinds,
    said,
)

pytest.importorskip("mcp", reason="needs the SDK of MCP: pip install 'llmjax[mcp]'")


def tokens_of(http: httpx.Client, script: str, items: list[dict[str, Any]], **more: Any) -> int:
    response = http.post(f"{RESPONSES}/input_tokens", json=body(script, input=items, **more))
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


@pytest.mark.parametrize("script", ["seek", "deep"])
def test_rounds_that_are_sent_back_are_read_as_they_were(http: httpx.Client, script: str) -> None:
    """The prompts of all rounds together have as many tokens as those of a client that sends back what came before each
    of them: the two calls of one round are one answer, those of two rounds two."""
    found = answer(http, script)
    user = {"role": "user", "content": "Go on"}
    made = [place for place, item in enumerate(found["output"]) if item["type"] == "mcp_call"]
    ends = made[1:] if script == "seek" else made
    rounds = [[], *(found["output"][: place + 1] for place in ends)]
    read = [tokens_of(http, script, [user, *items]) for items in rounds[:-1]]
    read.append(tokens_of(http, script, [user, *rounds[-1]], tools=None))  # after the last call there are none
    assert found["usage"]["input_tokens"] == sum(read)
    again = answer(http, script, input="Go on", previous_response_id=found["id"])
    whole = tokens_of(http, script, [user, *found["output"], user])
    assert again["usage"]["input_tokens"] == whole


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


@pytest.mark.parametrize("other", [{"type": "function", "name": "local__add", "parameters": {"type": "object"}}, LOCAL])
def test_names_that_collide_are_told(http: httpx.Client, other: dict[str, Any]) -> None:
    response = http.post(RESPONSES, json=body("sum", tools=[LOCAL, other]))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools")
    assert "two functions called 'local__add'" in error["message"]


def test_chats_say_where_tool_servers_are_called(http: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "tools": [LOCAL]}
    response = http.post("/v1/chat/completions", json=chat)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools.0.type")
    assert "/v1/responses" in error["message"] and "--mcp-config" in error["message"]


def test_tools_are_listed(http: httpx.Client) -> None:
    local, remote = http.get("/v1/tool_servers").json()["data"]
    assert (local["server_label"], remote["server_label"]) == ("local", "remote")
    assert [tool["name"] for tool in local["tools"]] == TOOLS
    assert local["tools"][0]["input_schema"]["properties"].keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"server_label": "other"}, "server_label", "it has local, remote"),
        ({"server_label": None}, "server_label", "local"),
        ({"server_url": "http://127.0.0.1:1/mcp"}, "server_url", "--mcp-config"),
        ({"headers": {"a": "b"}}, "headers", "operator"),
        ({"allowed_tools": ["secret"]}, "allowed_tools", "'secret', which is not allowed"),
        ({"allowed_tools": "add"}, "allowed_tools", "list of names"),
        ({"allowed_tools": {"read_only": "yes"}}, "allowed_tools.read_only", "true or false"),
        ({"require_approval": "sometimes"}, "require_approval", "never"),
        ({"require_approval": {"often": {}}}, "require_approval", "never"),
        ({"require_approval": {"never": {"tool_names": ["secret"]}}}, "require_approval.never", "'secret'"),
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
