"""/v1/responses against openai's own client and types: a real server, and a model that says what a script says."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import BaseModel, TypeAdapter

from llmjax.config import ServerConfig
from llmjax.errors import GenerationFailed, QueueFull
from llmjax.outputs import CompletionOutput, RequestOutput
from tests.serve.scripted import scripted_engine

RESPONSES = "/v1/responses"
CONTEXT = 1024
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "What it will be like",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
SCRIPTS = {
    "plain": "Nothing to <do> here, is there?",
    "two calls": 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm \\"S\\"", "days": 3}}\n'
    '</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>',
    "thought and call": "<think>\nThe city is Paris, so get_weather fits.\n</think>\n\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Paris, France"}}</tool_call>',
    "[THINK]": "So they say hello. I shall greet.\n\n[/THINK] Good day to you!",
    "namespaced": '<tool_call>{"name": "get__weather", "arguments": {"city": "Graz"}}</tool_call>',
    "object": '{"town":"Wien","size":1931}',
    "edited": '<tool_call>{"name": "edit", "arguments": {"input": "- \\"old\\"\\n+ new \\u00fc\\n"}}</tool_call>',
    "forced": '[{"name":"get_weather","arguments":{"city":"Oslo"}}]',
}
EDIT: dict[str, Any] = {"type": "custom", "name": "edit", "description": "Changes files"}
SPECIAL = ["<think>", "[THINK]", "[/THINK]"]
TEMPLATE = (
    "{# <tool_call> <think></think> #}{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}|{{ m.name or '' }}|{{ m.tool_call_id or '' }}|{{ m.content or '' }}"
    "{{ '~' ~ m.reasoning_content if m.reasoning_content else '' }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{{ '\n' }}{% endfor %}{{ '[[' ~ script ~ ']]' }}"
)
THINKING = TEMPLATE.replace("<tool_call> <think></think>", "[/THINK] <tool_call>").replace(
    "{{ '[[' ~ script ~ ']]' }}", "[THINK]"
)
KEYS = ("first-key", "second-key")
MOST = 4


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, start_server: Any, compile_cache_dir: str) -> Iterator[Any]:
    config = scripted_engine(
        tmp_path_factory.mktemp("models") / "scripted",
        SCRIPTS,
        special=SPECIAL,
        template=TEMPLATE,
        context=CONTEXT,
        compile_cache_dir=compile_cache_dir,
    )
    settings = ServerConfig(
        port=0, trust_request_chat_template=True, api_key=KEYS, max_stored_responses=MOST, sse_keep_alive_interval=0
    )
    server, stop = start_server(config, settings)
    yield server
    stop()


def http_of(running: Any, key: str) -> httpx.Client:
    return httpx.Client(base_url=running.url, timeout=None, headers={"authorization": f"Bearer {key}"})


@pytest.fixture
def http(running: Any) -> Iterator[httpx.Client]:
    with http_of(running, KEYS[0]) as client:
        yield client


@pytest.fixture
def client(running: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=KEYS[0], max_retries=0, timeout=None) as client:
        yield client


def extra(script: str) -> dict[str, Any]:
    """What a request has that OpenAI's do not: it names the script."""
    own = {"chat_template": THINKING} if script == "[THINK]" else {}
    return {"chat_template_kwargs": {"script": script}, **own}


def body(script: str, **more: Any) -> dict[str, Any]:
    fields = {"model": "scripted", "input": "Weather?", "tools": [WEATHER], "temperature": 0, **extra(script)}
    return {**fields, **more}


def answer(http: httpx.Client, script: str, **more: Any) -> dict[str, Any]:
    response = http.post(RESPONSES, json=body(script, **more))
    assert response.status_code == 200, response.text
    Response.model_validate_json(response.content, strict=True)
    found: dict[str, Any] = response.json()
    return found


def refusal(http: httpx.Client, script: str = "plain", *, status: int = 400, **more: Any) -> dict[str, Any]:
    response = http.post(RESPONSES, json=body(script, **more))
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each of them valid, named by its type and in its place."""
    assert response.status_code == 200, response.read()
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.iter_lines() if line]
    names, datas = lines[::2], lines[1::2]
    events = [json.loads(data.removeprefix("data: ")) for data in datas]
    assert names == [f"event: {event['type']}" for event in events]
    for data in datas:
        EVENT.validate_json(data.removeprefix("data: "), strict=True)
    return events


def streamed(http: httpx.Client, script: str, **more: Any) -> list[dict[str, Any]]:
    with http.stream("POST", RESPONSES, json=body(script, stream=True, **more)) as response:
        events = events_of(response)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def said(output: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """What items say, without their ids."""
    found: list[tuple[str, Any]] = []
    for item in output:
        match item["type"]:
            case "function_call":
                assert item["call_id"] and item["status"] == "completed"
                found.append((item["name"], json.loads(item["arguments"])))
            case kind:
                found.append((kind, "".join(part["text"] for part in item["content"])))
    assert len({item["id"] for item in output}) == len(output)
    return found


EXPECTED: dict[str, list[tuple[str, Any]]] = {
    "plain": [("message", SCRIPTS["plain"])],
    "two calls": [
        ("message", "I look."),
        ("get_weather", {"city": 'Ulm "S"', "days": 3}),
        ("get_weather", {"city": "Bonn"}),
    ],
    "thought and call": [
        ("reasoning", "The city is Paris, so get_weather fits."),
        ("get_weather", {"city": "Paris, France"}),
    ],
    "[THINK]": [("reasoning", "So they say hello. I shall greet."), ("message", "Good day to you!")],
}


@pytest.mark.parametrize("script", EXPECTED)
def test_a_response_has_what_the_model_says(http: httpx.Client, script: str) -> None:
    found = answer(http, script, metadata={"a": "b"}, instructions="Be brief.")
    assert said(found["output"]) == EXPECTED[script]
    assert found["status"] == "completed" and found["id"].startswith("resp_") and found["completed_at"]
    assert found["metadata"] == {"a": "b"} and found["instructions"] == "Be brief." and found["model"] == "scripted"
    usage = found["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    reasons = any(kind == "reasoning" for kind, _ in EXPECTED[script])
    assert (usage["output_tokens_details"]["reasoning_tokens"] > 0) == reasons
    again = answer(http, script, metadata={"a": "b"}, instructions="Be brief.")
    assert again["usage"]["input_tokens_details"]["cached_tokens"] > 0


BEFORE_TEXT = ["response.output_item.added", "response.content_part.added"]
AFTER_TEXT = ["response.content_part.done", "response.output_item.done"]
ORDER = {
    "message": [*BEFORE_TEXT, "response.output_text.delta", "response.output_text.done", *AFTER_TEXT],
    "reasoning": [*BEFORE_TEXT, "response.reasoning_text.delta", "response.reasoning_text.done", *AFTER_TEXT],
    "get_weather": [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ],
}


@pytest.mark.parametrize("script", EXPECTED)
def test_events_come_in_their_order_and_say_the_same(http: httpx.Client, script: str) -> None:
    events = streamed(http, script)
    kinds = [kind for kind, _ in itertools.groupby(event["type"] for event in events)]
    items = [kind for item, _ in EXPECTED[script] for kind in ORDER[item]]
    assert kinds == ["response.created", "response.in_progress", *items, "response.completed"]
    final = events[-1]["response"]
    assert said(final["output"]) == EXPECTED[script]
    assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"
    for index, item in enumerate(final["output"]):
        own = [event for event in events if event.get("output_index") == index]
        assert all(event.get("item_id", item["id"]) == item["id"] for event in own)
        assert own[0]["item"]["id"] == item["id"] and own[0]["item"]["status"] == "in_progress"
        assert own[-1]["item"] == item
        text = "".join(event["delta"] for event in own if "delta" in event)
        assert text == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
    whole = answer(http, script)
    assert said(whole["output"]) == said(final["output"]) and whole.keys() == final.keys()


def test_custom_tools(http: httpx.Client) -> None:
    text = '- "old"\n+ new ü\n'
    (item,) = answer(http, "edited", tools=[WEATHER, EDIT])["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "edit", text)
    assert item["id"].startswith("ctc_") and item["call_id"]
    events = streamed(http, "edited", tools=[EDIT])
    kinds = [kind for kind, _ in itertools.groupby(event["type"] for event in events[2:-1])]
    assert kinds == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    assert "".join(event["delta"] for event in events if "delta" in event) == text
    final = events[-1]["response"]
    assert events[-3]["input"] == text == final["output"][0]["input"] and final["tools"][0]["type"] == "custom"
    result = {"type": "custom_tool_call_output", "call_id": final["output"][0]["call_id"], "output": "done"}
    follows = answer(http, "plain", tools=[EDIT], input=[result], previous_response_id=final["id"])
    assert said(follows["output"])[0][0] == "message"
    listed = http.get(f"{RESPONSES}/{follows['id']}/input_items", params={"order": "asc"}).json()["data"]
    ResponseItemList.model_validate_json(http.get(f"{RESPONSES}/{follows['id']}/input_items").content, strict=True)
    assert [entry["type"] for entry in listed] == ["message", "custom_tool_call", "custom_tool_call_output"]
    assert listed[1]["input"] == text and listed[2]["output"] == "done"


@pytest.mark.slow
def test_formats_of_custom_tools(http: httpx.Client) -> None:
    digits = {**EDIT, "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3,5}"}}
    for choice in ("required", {"type": "custom", "name": "edit"}):
        found = answer(http, "plain", tools=[digits], tool_choice=choice, max_output_tokens=200, seed=1, temperature=1)
        assert all(re.fullmatch("[0-9]{3,5}", item["input"]) for item in found["output"]), found["output"]
    lines = {"type": "grammar", "syntax": "lark", "definition": 'start: LINE~1..2\nLINE: /"[a-z]{1,3}"\\n/'}
    # The script calls the tool, with another text; a form for the answer's text leaves calls theirs.
    for field in ({"tool_choice": "required"}, {"tool_choice": "auto"}, {"text": {"format": {"type": "json_object"}}}):
        response = http.post(
            RESPONSES, json=body("edited", tools=[{**EDIT, "format": lines}], max_output_tokens=300, seed=1, **field)
        )
        found = response.json()["output"]
        assert found and all(re.fullmatch('("[a-z]{1,3}"\n){1,2}', item["input"]) for item in found), found
        assert "x-ignored-fields" not in response.headers
    no_text = {"type": "grammar", "syntax": "lark", "definition": "start: <|im_end|>"}
    assert refusal(http, tools=[{**EDIT, "format": no_text}])["param"] == "tools.0.format"
    no_rule = {"type": "grammar", "syntax": "lark", "definition": "start: nothing"}
    assert refusal(http, tools=[{**EDIT, "format": no_rule}])["param"] == "tools"


def test_a_search_that_nobody_makes_is_left_out(http: httpx.Client) -> None:
    response = http.post(RESPONSES, json=body("plain", tools=[{"type": "web_search"}, WEATHER]))
    assert response.headers["x-ignored-fields"] == "tools.0"
    assert said(response.json()["output"]) == EXPECTED["plain"]
    assert refusal(http, tools=[{"type": "web_search"}], tool_choice="required")["param"] == "tool_choice"


def test_an_effort_that_the_model_does_not_know_is_named(http: httpx.Client) -> None:
    """Codex asks every model for one."""
    body = {"input": "Hello", "reasoning": {"effort": "medium"}, "max_output_tokens": 1}
    response = http.post("/v1/responses", json=body)
    assert (response.status_code, response.headers["x-ignored-fields"]) == (200, "reasoning.effort")
    refused = http.post("/v1/responses", json={**body, "reasoning": {"effort": "none"}})
    assert refused.json()["error"]["param"] == "reasoning.effort"  # this model reasons, and cannot be told not to


def test_a_response_that_was_cut_is_incomplete(http: httpx.Client) -> None:
    found = answer(http, "plain", max_output_tokens=3)
    assert found["status"] == "incomplete" and found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["output"][0]["status"] == "incomplete" and found["usage"]["output_tokens"] == 3
    events = streamed(http, "plain", max_output_tokens=3)
    assert events[-1]["type"] == "response.incomplete" and events[-1]["response"]["status"] == "incomplete"


def test_logprobs_and_obfuscation(http: httpx.Client) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "tools": []}
    (part,) = answer(http, "plain", **asked)["output"][0]["content"]
    assert len(part["logprobs"]) > 5 and all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    events = streamed(http, "plain", stream_options={"include_obfuscation": True}, **asked)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert all(event["obfuscation"] for event in deltas)
    assert "".join(event["delta"] for event in deltas) == SCRIPTS["plain"]
    tokens = [entry["token"] for event in deltas for entry in event["logprobs"]]
    assert tokens == [entry["token"] for entry in part["logprobs"]] and "".join(tokens) == SCRIPTS["plain"]


def test_forms_and_forced_calls(http: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"town": {"type": "string"}, "size": {"type": "integer"}},
        "required": ["town", "size"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "name": "town", "schema": schema, "strict": True}}
    found = answer(http, "object", tools=[], text=form)
    assert json.loads(said(found["output"])[0][1]) == {"town": "Wien", "size": 1931}
    assert found["text"] == form
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        found = answer(http, "forced", tool_choice=choice, max_output_tokens=200)
        assert {item["type"] for item in found["output"]} == {"function_call"}
        assert found["tool_choice"] == choice
    other = {**WEATHER, "name": "other"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    found = answer(http, "forced", tools=[other, WEATHER], tool_choice=allowed, max_output_tokens=200)
    assert {item["name"] for item in found["output"]} == {"get_weather"}
    found = answer(http, "two calls", parallel_tool_calls=False)
    assert said(found["output"]) == EXPECTED["two calls"][:2] and found["parallel_tool_calls"] is False
    assert said(answer(http, "two calls", tool_choice="none")["output"])[0][0] == "message"


class Town(BaseModel):
    town: str
    size: int


def test_the_helpers_of_openais_client(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "scripted", "input": "Weather?", "temperature": 0}
    parsed = client.responses.parse(**fields, text_format=Town, extra_body=extra("object"))
    assert parsed.output_parsed == Town(town="Wien", size=1931)
    with client.responses.stream(**fields, text_format=Town, extra_body=extra("object")) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_parsed == Town(town="Wien", size=1931) and kinds[-1] == "response.completed"
    tools: Any = [WEATHER]
    with client.responses.stream(**fields, tools=tools, extra_body=extra("two calls")) as stream:
        texts = [event.snapshot for event in stream if event.type == "response.function_call_arguments.delta"]
        found = stream.get_final_response()
    assert json.loads(texts[-1]) == {"city": "Bonn"}
    assert [item.type for item in found.output] == ["message", "function_call", "function_call"]
    assert client.responses.create(**fields, extra_body=extra("plain")).output_text == SCRIPTS["plain"]


async def test_the_async_client(running: Any) -> None:
    fields: dict[str, Any] = {"model": "scripted", "input": "Weather?", "temperature": 0}
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=KEYS[0], max_retries=0) as client:
        created = await client.responses.create(**fields, extra_body=extra("[THINK]"))
        assert created.output_text == "Good day to you!"
        stream = await client.responses.create(**fields, stream=True, extra_body=extra("plain"))
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        assert text == SCRIPTS["plain"]
        assert (await client.responses.retrieve(created.id)).id == created.id


def test_a_loop_of_calls_as_agents_run_it(http: httpx.Client) -> None:
    """Stateless: everything that came is sent back, as Codex does it."""
    stateless: dict[str, Any] = {"store": False, "include": ["reasoning.encrypted_content"]}
    first = answer(http, "thought and call", **stateless)
    thought, call = first["output"]
    assert thought["encrypted_content"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    items = [{"role": "user", "content": "Weather?"}, thought, call, result]
    answer(http, "plain", input=items, **stateless)
    sealed = {name: value for name, value in thought.items() if name != "content"}
    function = {"name": "get_weather", "arguments": call["arguments"]}
    messages = [
        {"role": "system", "content": "Be brief."},
        items[0],
        {
            "role": "assistant",
            "reasoning_content": "The city is Paris, so get_weather fits.",
            "tool_calls": [{"id": call["call_id"], "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call["call_id"], "content": "sunny"},
    ]
    function = {name: value for name, value in WEATHER.items() if name != "type"}
    chat = {"messages": messages, "tools": [{"type": "function", "function": function}]}
    count = http.post("/tokenize", json={**chat, "chat_template_kwargs": {"script": "plain"}}).json()["count"]
    for reasoning in (thought, sealed):
        asked = body("plain", instructions="Be brief.", input=[items[0], reasoning, call, result])
        del asked["temperature"]
        found = http.post(f"{RESPONSES}/input_tokens", json=asked)
        assert found.json() == {"object": "response.input_tokens", "input_tokens": count}, found.text


def test_functions_in_namespaces(http: httpx.Client) -> None:
    inner = {name: value for name, value in WEATHER.items() if name != "name"} | {"name": "weather"}
    tools = [{"type": "namespace", "name": "get", "description": "What can be got", "tools": [inner]}]
    found = answer(http, "namespaced", tools=tools, client_metadata={"x": "y"})
    (call,) = found["output"]
    assert (call["namespace"], call["name"], call["arguments"]) == ("get", "weather", '{"city": "Graz"}')
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "snow"}
    again = answer(http, "plain", tools=tools, previous_response_id=found["id"], input=[result])
    flat = {**WEATHER, "name": "get__weather"}
    sent = [{"role": "user", "content": "Weather?"}, {**call, "name": "get__weather"}, result]
    del sent[1]["namespace"]
    assert answer(http, "plain", tools=[flat], input=sent)["usage"]["input_tokens"] == again["usage"]["input_tokens"]
    for wrong in (None, [1], [{"type": "function"}]):
        assert refusal(http, tools=[{"type": "namespace", "name": "x", "tools": wrong}])["param"] == "tools.0"


def test_a_response_follows_another(http: httpx.Client, client: openai.OpenAI) -> None:
    first = answer(http, "two calls", instructions="Forgotten later.")
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "rain"} for call in calls]
    second = answer(http, "plain", previous_response_id=first["id"], input=results)
    assert second["previous_response_id"] == first["id"]
    explicit = [{"role": "user", "content": "Weather?"}, *first["output"], *results]
    assert answer(http, "plain", input=explicit)["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    page = http.get(f"{RESPONSES}/{second['id']}/input_items", params={"order": "asc"})
    ResponseItemList.model_validate_json(page.content, strict=True)
    assert [item["type"] for item in page.json()["data"]] == [
        "message",
        "message",
        *["function_call"] * 2,
        *["function_call_output"] * 2,
    ]
    listed = list(client.responses.input_items.list(second["id"], limit=4))  # goes on to the second page
    assert [item.id for item in listed] == [item["id"] for item in reversed(page.json()["data"])]
    kept = http.get(f"{RESPONSES}/{second['id']}")
    assert Response.model_validate_json(kept.content, strict=True) and kept.json() == second
    client.responses.delete(second["id"])
    assert http.get(f"{RESPONSES}/{second['id']}").status_code == 404
    assert refusal(http, status=404, previous_response_id=second["id"])["param"] == "previous_response_id"


def test_what_is_kept_has_an_owner_and_bounds(running: Any, http: httpx.Client) -> None:
    ids = [answer(http, "plain")["id"] for _ in range(MOST + 1)]
    statuses = [http.get(f"{RESPONSES}/{id}").status_code for id in ids]
    assert statuses == [404] + [200] * MOST
    unkept = answer(http, "plain", store=False)
    assert http.get(f"{RESPONSES}/{unkept['id']}").status_code == 404
    with http_of(running, KEYS[1]) as other:
        assert other.get(f"{RESPONSES}/{ids[-1]}").status_code == 404
        assert other.delete(f"{RESPONSES}/{ids[-1]}").status_code == 404
        assert refusal(other, status=404, previous_response_id=ids[-1])["param"] == "previous_response_id"
    (last,) = [event["response"]["id"] for event in streamed(http, "plain")[-1:]]
    assert http.get(f"{RESPONSES}/{last}").json()["status"] == "completed"


async def test_in_the_background(running: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=KEYS[0], max_retries=0) as client:
        fields: dict[str, Any] = {"model": "scripted", "input": "Weather?", "temperature": 0, "background": True}
        begun = await client.responses.create(**fields, extra_body=extra("plain"))
        assert begun.status == "queued" and begun.background
        async with asyncio.timeout(60):
            while (found := await client.responses.retrieve(begun.id)).status in ("queued", "in_progress"):
                await asyncio.sleep(0.02)
        assert found.status == "completed" and found.output_text == SCRIPTS["plain"]
        stream = await client.responses.create(**fields, stream=True, extra_body=extra("plain"))
        async for event in stream:  # its client leaves it after some events
            if event.type == "response.created":
                id = event.response.id
            if event.sequence_number == 4:
                break
        await stream.close()
        rest = await client.responses.retrieve(id, stream=True, starting_after=4)
        numbers = [event.sequence_number async for event in rest]
        assert numbers == list(range(5, 5 + len(numbers))) and numbers
        assert (await client.responses.retrieve(id)).output_text == SCRIPTS["plain"]


def test_a_stream_is_taken_up_again(http: httpx.Client) -> None:
    events = streamed(http, "two calls", background=True)
    assert [event["type"] for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    final = events[-1]["response"]
    assert final["status"] == "completed" and said(final["output"]) == EXPECTED["two calls"]
    place = f"{RESPONSES}/{final['id']}"
    for after in (-1, 0, 5, len(events) - 1):
        with http.stream("GET", place, params={"stream": "true", "starting_after": after}) as response:
            assert events_of(response) == events[after + 1 :]
    assert http.post(f"{place}/cancel").json() == http.get(place).json() == final  # it was over
    assert http.get(place, params={"starting_after": 1}).json()["error"]["param"] == "starting_after"


@pytest.fixture
def held(running: Any, monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """The engine answers nothing; each request that is aborted counts."""
    aborted = threading.Semaphore(0)

    async def generate(*_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        try:
            await asyncio.Event().wait()
            yield
        finally:
            aborted.release()

    monkeypatch.setattr(running.engine, "generate", generate)
    return aborted


def test_a_response_is_canceled(http: httpx.Client, held: threading.Semaphore) -> None:
    begun = answer(http, "plain", background=True)
    place = f"{RESPONSES}/{begun['id']}"
    assert http.get(place).json() == begun and begun["status"] == "queued"
    assert refusal(http, previous_response_id=begun["id"])["param"] == "previous_response_id"
    canceled = http.post(f"{place}/cancel")
    Response.model_validate_json(canceled.content, strict=True)
    assert canceled.json()["status"] == "cancelled"
    assert held.acquire()
    with http.stream("GET", place, params={"stream": "true"}) as response:
        events_of(response)  # ends
    begun = answer(http, "plain", background=True)
    assert http.delete(f"{RESPONSES}/{begun['id']}").json()["deleted"] is True
    assert held.acquire()
    ids = [answer(http, "plain", background=True)["id"] for _ in range(MOST)]
    assert refusal(http, status=503, background=True)["code"] == "queue_full"  # what is written is not forgotten
    for id in ids:
        assert http.delete(f"{RESPONSES}/{id}").status_code == 200


def test_only_what_runs_in_the_background_is_canceled(http: httpx.Client) -> None:
    place = f"{RESPONSES}/{answer(http, 'plain')['id']}"
    assert http.post(f"{place}/cancel").status_code == 400
    assert http.get(place, params={"stream": "true"}).json()["error"]["param"] == "stream"


def test_a_stream_that_fails_says_so(running: Any, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(*_: Any, **__: Any) -> AsyncGenerator[RequestOutput, None]:
        yield RequestOutput("r", None, [], [CompletionOutput(0, "Half", [1])], finished=False)
        raise GenerationFailed("the logits are not finite")

    monkeypatch.setattr(running.engine, "generate", generate)
    with http.stream("POST", RESPONSES, json=body("plain", stream=True)) as response:
        events = events_of(response)
    assert [event["type"] for event in events][-3:] == [*AFTER_TEXT, "response.failed"]
    failed = events[-1]["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == "server_error"
    assert "not finite" in failed["error"]["message"] and failed["output"][0]["status"] == "incomplete"
    in_background = streamed(http, "plain", background=True)
    assert in_background[-1]["response"]["error"] == failed["error"]
    assert http.get(f"{RESPONSES}/{in_background[0]['response']['id']}").json()["status"] == "failed"

    async def full(*_: Any, **__: Any) -> AsyncGenerator[RequestOutput, None]:
        raise QueueFull("too many wait", retry_after=1)
        yield

    monkeypatch.setattr(running.engine, "generate", full)
    assert refusal(http, status=503, stream=True)["code"] == "queue_full"  # before the stream has begun
    events = streamed(http, "plain", background=True)
    assert [event["type"] for event in events][::3] == ["response.created", "response.failed"]
    assert events[-1]["response"]["error"]["code"] == "rate_limit_exceeded"


def test_tools_that_clients_offer_anyway_are_left_out(http: httpx.Client) -> None:
    kinds = ("image_generation", "tool_search", "local_shell", "web_search")
    offered = [WEATHER, *({"type": kind, "output_format": "png"} for kind in kinds)]
    response = http.post(RESPONSES, json=body("two calls", tools=offered))
    assert response.headers["x-ignored-fields"] == "tools.1,tools.2,tools.3,tools.4"
    assert [item["name"] for item in response.json()["output"] if item["type"] == "function_call"] == [
        "get_weather"
    ] * 2


def test_a_response_tells_its_penalties_and_when_it_ended(http: httpx.Client) -> None:
    found = answer(http, "plain", presence_penalty=0.5, frequency_penalty=0.25)
    assert (found["presence_penalty"], found["frequency_penalty"]) == (0.5, 0.25)
    assert found["completed_at"] >= found["created_at"]
    created, *_ = streamed(http, "plain")
    response = created["response"]
    assert (response["completed_at"], response["presence_penalty"], response["frequency_penalty"]) == (None, 0, 0)


def tokens_of(http: httpx.Client, items: list[dict[str, Any]], **more: Any) -> int:
    response = http.post(f"{RESPONSES}/input_tokens", json={"input": items, **more})
    assert response.status_code == 200, response.text
    found: int = response.json()["input_tokens"]
    return found


USER = {"role": "user", "content": "x"}


def test_items_of_other_servers_end_no_conversation(http: httpx.Client) -> None:
    kinds = ("web_search_call", "image_generation_call", "tool_search_call", "tool_search_output", "compaction")
    items = [USER, *({"type": kind, "id": "x"} for kind in kinds)]
    response = http.post(RESPONSES, json=body("plain", input=items))
    assert response.status_code == 200, response.text
    assert response.headers["x-ignored-fields"] == ",".join(f"input.{i}" for i in range(1, 6))
    assert tokens_of(http, items) == tokens_of(http, [USER])
    listed = http.get(f"{RESPONSES}/{response.json()['id']}/input_items").json()["data"]
    assert [item["type"] for item in listed] == [*reversed(kinds), "message"]


def test_calls_of_tools_that_clients_run_are_those_of_functions(http: httpx.Client) -> None:
    action = {"type": "exec", "command": ["ls"]}
    older = [
        {"type": "local_shell_call", "id": "i", "call_id": "c", "action": action},
        {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
    ]
    newer = [
        {"type": "function_call", "call_id": "c", "name": "local_shell", "arguments": json.dumps(action)},
        {"type": "function_call_output", "call_id": "c", "output": "a.txt"},
    ]
    assert tokens_of(http, [USER, *older]) == tokens_of(http, [USER, *newer])
    id = answer(http, "plain", input=[USER, *older])["id"]
    assert tokens_of(http, [USER], previous_response_id=id) > tokens_of(http, [USER, *older])


def test_screenshots_are_results_with_a_picture(http: httpx.Client) -> None:
    """Histories of OpenAI's computer are read, whose calls name one action or several."""
    click = {"type": "click", "x": 3, "y": 4}
    shot = {"type": "computer_screenshot", "image_url": "data:image/png;base64,AAAA"}
    for actions in ({"action": click}, {"actions": [click]}):
        call = {"type": "computer_call", "id": "i", "call_id": "c", "pending_safety_checks": [], **actions}
        found = {"type": "computer_call_output", "call_id": "c", "output": shot}
        written = json.dumps(next(iter(actions.values())))
        same = [
            {"type": "function_call", "call_id": "c", "name": "computer", "arguments": written},
            {"type": "function_call_output", "call_id": "c", "output": [{**shot, "type": "input_image"}]},
        ]
        assert tokens_of(http, [USER, call, found]) == tokens_of(http, [USER, *same])
        response = http.post(RESPONSES, json=body("plain", input=[USER, call, found]))
        assert response.headers["x-ignored-fields"] == "input.2.output.0"  # the model reads text only
        listed = http.get(f"{RESPONSES}/{response.json()['id']}/input_items").json()["data"]
        assert listed[0]["output"] == shot and listed[1].items() >= actions.items()


@pytest.mark.parametrize("written", ['{"city": "Ulm', "{'city': 'Ulm'}", ["Ulm"], None, ""], ids=str)
def test_arguments_that_are_not_json_end_no_conversation(http: httpx.Client, written: Any) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": written}
    result = {"type": "function_call_output", "call_id": "c", "output": "1"}
    found = answer(http, "plain", input=[USER, call, result])
    again = answer(http, "plain", input=[USER], previous_response_id=found["id"])
    assert again["usage"]["input_tokens"] > found["usage"]["input_tokens"]


def test_pictures_in_results_are_noted(http: httpx.Client) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "data:"}]}
    response = http.post(RESPONSES, json=body("plain", input=[USER, call, result]))
    assert response.headers["x-ignored-fields"] == "input.2.output.0"
    noted = {**result, "output": "[input_image: not shown, this model reads text only]"}
    assert tokens_of(http, [USER, call, result]) == tokens_of(http, [USER, call, noted])


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"tools": [{"type": "file_search"}]}, "tools.0.type", "the server runs no tools"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools.0.type", "code_interpreter"),
        ({"tools": [{"type": "computer_use_preview"}]}, "tools.0.type", "computer_use_preview"),
        (
            {"tools": [{"type": "image_generation"}], "tool_choice": {"type": "image_generation"}},
            "tool_choice",
            "function",
        ),
        ({"tools": [{**EDIT, "format": {"type": "xml"}}]}, "tools.0.format", "regex or lark"),
        ({"tools": [{**EDIT, "name": ""}]}, "tools.0.name", "name"),
        ({"tools": [EDIT], "tool_choice": {"type": "custom", "name": "x"}}, "tool_choice", "x"),
        ({"input": [{"type": "custom_tool_call", "name": "f", "call_id": "c"}]}, "input.0.input", "string"),
        ({"tools": [WEATHER, {"type": "mcp", "server_label": "x"}]}, "tools.1.server_label", "--mcp-config"),
        ({"tools": [{**WEATHER, "name": ""}]}, "tools.0.name", "name"),
        ({"tools": [{**WEATHER, "parameters": 1}]}, "tools.0.parameters", "object"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "x"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "tool_choice"),
        ({"input": []}, "input", "1 item"),
        ({"input": [{"type": "web_search_cal", "id": "x"}]}, "input.0.type", "web_search_cal"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "user"),
        ({"input": [{"role": "user"}]}, "input.0.content", "string"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0.type",
            "input_image",
        ),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id", "string"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input.0.output", "string"),
        ({"input": "x" * 5000}, "input", "tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"n": 2}, "n", "one answer"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.json_schema.schema", "object"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "xml"),
        ({"include": ["everything"]}, "include.0", "everything"),
        ({"background": True, "store": False}, "background", "store"),
        ({"conversation": "x"}, "conversation", "previous_response_id"),
        ({"truncation": "auto"}, "truncation", "items"),
        ({"temprature": 1}, "temprature", "temperature"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, more: dict[str, Any], param: str, words: str) -> None:
    error = refusal(http, **more)
    assert error["param"] == param and words in error["message"], error


def test_items_are_referred_to(http: httpx.Client) -> None:
    first = http.post("/v1/responses", json={"input": "Hello the world", "max_output_tokens": 6}).json()
    (message,) = first["output"]
    asked = http.get(f"/v1/responses/{first['id']}/input_items").json()["data"][0]["id"]
    items = [{"type": "item_reference", "id": asked}, {"type": "item_reference", "id": message["id"]}]
    user = {"role": "user", "content": "and then"}
    by_id = http.post("/v1/responses/input_tokens", json={"input": [*items, user]}).json()
    said = {"role": "assistant", "content": message["content"]}
    whole = http.post(
        "/v1/responses/input_tokens", json={"input": [{"role": "user", "content": "Hello the world"}, said, user]}
    ).json()
    assert by_id == whole and by_id["input_tokens"] > 10
    second = http.post("/v1/responses", json={"input": [*items, user], "max_output_tokens": 4})
    assert second.status_code == 200
    assert len(http.get(f"/v1/responses/{second.json()['id']}/input_items").json()["data"]) == 3
    for reference, status in (
        ({"type": "item_reference", "id": "msg_none"}, 404),
        ({"type": "item_reference"}, 400),
        ({"type": "item_reference", "id": 3}, 400),
    ):
        assert http.post("/v1/responses", json={"input": [reference, user]}).status_code == status
    assert http.post("/v1/responses", json={"input": [items[0], items[0], user]}).status_code == 400
