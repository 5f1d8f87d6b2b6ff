"""Calls of tool servers that the client is asked to approve first."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseInputItem
from pydantic import TypeAdapter

from tests.serve.mcp.conftest import LOCAL, RESPONSES, SCRIPTS, answer, body, calls, events_of, kinds, said

pytest.importorskip("mcp", reason="needs the SDK of MCP: pip install 'llmjax[mcp]'")

ASKING = {**LOCAL, "require_approval": "always"}
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseInputItem)


def requests(response: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for item in response["output"] if item["type"] == "mcp_approval_request"]


def reply(request: dict[str, Any], approve: bool, **more: Any) -> dict[str, Any]:
    return {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": approve, **more}


def prompt(http: httpx.Client, script: str, items: list[dict[str, Any]]) -> str:
    """What the model reads of items."""
    found = http.post(f"{RESPONSES}/input_tokens", json=body(script, input=items, tools=[ASKING]))
    assert found.status_code == 200, found.text
    return str(found.json()["input_tokens"])


@pytest.mark.parametrize("approval", ["always", None, {"always": {"tool_names": ["add"]}}, {}])
def test_a_call_waits_for_approval(http: httpx.Client, approval: Any) -> None:
    tools = [{**LOCAL, "require_approval": approval}]
    first = answer(http, "ask", tools=tools)
    assert (first["status"], kinds(first)) == ("completed", ["mcp_list_tools", "message", "mcp_approval_request"])
    (asked,) = requests(first)
    assert asked.keys() == {"id", "type", "server_label", "name", "arguments"}
    assert (asked["server_label"], asked["name"]) == ("local", "add")
    assert json.loads(asked["arguments"]) == {"a": 21, "b": 24}
    second = answer(http, "ask", tools=tools, input=[reply(asked, True)], previous_response_id=first["id"])
    assert kinds(second) == ["mcp_call", "message"]
    (made,) = calls(second)
    assert (made["output"], made["approval_request_id"], made["arguments"]) == ("45", asked["id"], asked["arguments"])
    assert said(second) == SCRIPTS["ask1"]
    third = answer(http, "ask", tools=tools, input="And?", previous_response_id=second["id"])
    assert calls(third) == []  # it is made once


def test_without_storing_the_items_are_sent_back(http: httpx.Client) -> None:
    user = {"role": "user", "content": "Go on"}
    first = answer(http, "ask", tools=[ASKING], store=False)
    items = [user, *first["output"], reply(requests(first)[0], True)]
    second = answer(http, "ask", tools=[ASKING], store=False, input=items)
    items += second["output"]
    for item in items:
        ITEM.validate_python(item)
    assert second["usage"]["input_tokens"] == int(prompt(http, "ask", items[:-1]))  # read as it was
    assert calls(answer(http, "ask", tools=[ASKING], input=[*items, user])) == []


@pytest.mark.parametrize("reason", [None, "too dear"])
def test_a_denial_is_told_to_the_model(http: httpx.Client, reason: str | None) -> None:
    user = {"role": "user", "content": "Go on"}
    first = answer(http, "ask", tools=[ASKING])
    denied = reply(requests(first)[0], False, reason=reason)
    second = answer(http, "ask", tools=[ASKING], input=[denied], previous_response_id=first["id"])
    assert (kinds(second), said(second)) == (["message"], SCRIPTS["ask1"])
    told = "Error: the user did not approve this call" + (": too dear" if reason else "")
    made = {**requests(first)[0], "type": "mcp_call", "output": told}
    assert second["usage"]["input_tokens"] == int(prompt(http, "ask", [user, *first["output"][:2], made]))


def test_the_stream_asks_and_goes_on(http: httpx.Client) -> None:
    events = events_of(http, "ask", tools=[ASKING])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    first = events[-1]["response"]
    (asked,) = requests(first)
    told = [event for event in events if event.get("item", {}).get("type") == "mcp_approval_request"]
    assert [event["type"] for event in told] == ["response.output_item.added", "response.output_item.done"]
    assert all(event["item"] == asked and event["output_index"] == 2 for event in told)
    follow = {"tools": [ASKING], "input": [reply(asked, True)], "previous_response_id": first["id"]}
    events = events_of(http, "ask", **follow)
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:2] == ["created", "in_progress"]
    assert names[2:7] == [
        *("output_item.added", "mcp_call.in_progress", "mcp_call_arguments.done"),
        *("mcp_call.completed", "output_item.done"),
    ]
    assert [event["item"]["type"] for event in events if event["type"] == "response.output_item.done"] == [
        *("mcp_call", "message")
    ]
    assert said(events[-1]["response"]) == SCRIPTS["ask1"]


def test_one_tool_asks_and_another_does_not(http: httpx.Client) -> None:
    tools = [{**LOCAL, "require_approval": {"never": {"tool_names": ["long"]}}}]
    first = answer(http, "both", tools=tools)
    assert kinds(first) == ["mcp_list_tools", "mcp_approval_request", "mcp_call"]
    assert calls(first)[0]["output"] == "é" * 37
    follow = {"tools": tools, "input": [reply(requests(first)[0], True)], "previous_response_id": first["id"]}
    second = answer(http, "both", **follow)
    assert (calls(second)[0]["output"], said(second)) == ("599", SCRIPTS["both2"])
    reading = answer(http, "both", tools=[{**LOCAL, "require_approval": {"never": {"read_only": True}}}])
    assert kinds(reading) == ["mcp_list_tools", "mcp_call", "mcp_approval_request"]  # what adds changes nothing


def test_a_question_that_is_not_answered_is_a_call_that_was_not_run(http: httpx.Client) -> None:
    first = answer(http, "ask", tools=[ASKING])
    second = answer(http, "ask", tools=[ASKING], input="Never mind", previous_response_id=first["id"])
    assert (kinds(second), said(second)) == (["message"], SCRIPTS["ask1"])


def test_what_is_approved_is_bounded_and_checked(http: httpx.Client) -> None:
    asked = [
        {"type": "mcp_approval_request", "id": f"mcpr_{i}", "server_label": "local", "name": "add", "arguments": text}
        for i, text in enumerate(['{"a": 1, "b": 1}', "[1]", '{"a": 2, "b": 2}', '{"a": 3, "b": 3}'])
    ]
    items = [{"role": "user", "content": "Go on"}, *asked, *(reply(one, True) for one in asked)]
    made = calls(answer(http, "deep", tools=[ASKING], input=items))
    assert [one["output"] for one in made] == ["2", None, "4", None]
    assert "not a JSON object" in made[1]["error"]["message"]
    assert "may make 3 calls" in made[3]["error"]["message"]


@pytest.mark.parametrize(
    ("items", "tools", "param"),
    [
        ([{"approval_request_id": "mcpr_x", "approve": True}], [ASKING], "input.2.approval_request_id"),
        ([{"approval_request_id": "mcpr_1"}], [ASKING], "input.2.approve"),
        ([{"approval_request_id": "mcpr_1", "approve": True, "reason": 3}], [ASKING], "input.2.reason"),
        ([{"approval_request_id": "mcpr_1", "approve": a} for a in (True, False)], [ASKING], "input.3"),
        ([{"approval_request_id": "mcpr_1", "approve": True}], None, "input"),
    ],
)
def test_what_is_refused(http: httpx.Client, items: list[dict[str, Any]], tools: Any, param: str) -> None:
    asked = {"type": "mcp_approval_request", "id": "mcpr_1", "server_label": "local", "name": "add", "arguments": "{}"}
    replies = [{"type": "mcp_approval_response", **item} for item in items]
    whole = body("ask", tools=tools, input=[{"role": "user", "content": "Hi"}, asked, *replies])
    response = http.post(RESPONSES, json=whole)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_openai_s_client_asks_and_answers(running: Any) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        more = {"extra_body": {"chat_template_kwargs": {"script": "ask"}}}
        tools: Any = [{**ASKING, "server_url": openai.omit}]
        first = client.responses.create(input="Go on", tools=tools, **more)
        asked = next(item for item in first.output if item.type == "mcp_approval_request")
        answered: Any = {"type": "mcp_approval_response", "approval_request_id": asked.id, "approve": True}
        with client.responses.stream(
            model="scripted", input=[answered], previous_response_id=first.id, tools=tools, **more
        ) as stream:
            names = [event.type for event in stream]
            second = stream.get_final_response()
    assert "response.mcp_call.completed" in names
    assert second.output_text == SCRIPTS["ask1"]
