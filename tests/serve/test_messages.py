"""/v1/messages against Anthropic's own client and types: a real server, and a model that says what a script says."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, ModelInfo, RawMessageStreamEvent
from pydantic import TypeAdapter

from llmjax.config import ServerConfig
from llmjax.errors import GenerationFailed
from llmjax.outputs import CompletionOutput, RequestOutput
from tests.serve.scripted import scripted_engine

MESSAGES = "/v1/messages"
CONTEXT = 1024
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
WEATHER: dict[str, Any] = {"name": "get_weather", "description": "What it will be like", "input_schema": SCHEMA}
SCRIPTS = {
    "plain": "Nothing to <do> here, is there?",
    "two calls": 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm \\"S\\"", "days": 3}}\n'
    '</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>',
    "thought and call": "<think>\nThe city is Paris, so get_weather fits.\n</think>\n\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Paris, France"}}</tool_call>',
    "forced": '[{"name":"get_weather","arguments":{"city":"Oslo"}}]',
    "object": '{"town":"Wien","size":1931}',
}
SPECIAL = ["<think>"]
TEMPLATE = (
    "{# <tool_call> <think></think> #}{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}|{{ m.tool_call_id or '' }}|{{ m.content or '' }}"
    "{{ '~' ~ m.reasoning_content if m.reasoning_content else '' }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{{ '' if loop.last and continue_final_message else '\n' }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking %}+{% endif %}"
    "{% if add_generation_prompt %}{{ '[[' ~ script ~ ']]' }}{% endif %}"
)
KEY = "the-key"


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
    server, stop = start_server(config, ServerConfig(port=0, api_key=[KEY], sse_keep_alive_interval=0))
    yield server
    stop()


@pytest.fixture
def http(running: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=None, headers={"x-api-key": KEY}) as client:
        yield client


@pytest.fixture
def client(running: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=running.url, api_key=KEY, max_retries=0, timeout=None) as client:
        yield client


def extra(script: str) -> dict[str, Any]:
    """What a request has that Anthropic's do not: it names the script."""
    return {"chat_template_kwargs": {"script": script}, "temperature": 0}


def body(script: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Weather?"}]
    fields = {"model": "scripted", "max_tokens": 200, "messages": messages, "tools": [WEATHER]}
    return {**fields, **extra(script), "thinking": {"type": "adaptive"}, **more}


def answer(http: httpx.Client, script: str, **more: Any) -> dict[str, Any]:
    response = http.post(MESSAGES, json=body(script, **more))
    assert response.status_code == 200, response.text
    Message.model_validate_json(response.content, strict=True)
    found: dict[str, Any] = response.json()
    return found


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.read()
    lines = [line for line in response.iter_lines() if line]
    names, datas = lines[::2], [line.removeprefix("data: ") for line in lines[1::2]]
    events = [json.loads(data) for data in datas]
    assert names == [f"event: {event['type']}" for event in events]
    for event, data in zip(events, datas, strict=True):
        if event["type"] != "error":
            EVENT.validate_json(data, strict=True)
    return events


def streamed(http: httpx.Client, script: str, **more: Any) -> list[dict[str, Any]]:
    with http.stream("POST", MESSAGES, json=body(script, stream=True, **more)) as response:
        return events_of(response)


def said(content: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for block in content:
        match block["type"]:
            case "tool_use":
                assert block["id"]
                found.append((block["name"], block["input"]))
            case "thinking":
                assert block["signature"]
                found.append(("thinking", block["thinking"]))
            case kind:
                found.append((kind, block["text"]))
    return found


EXPECTED: dict[str, list[tuple[str, Any]]] = {
    "plain": [("text", SCRIPTS["plain"])],
    "two calls": [
        ("text", "I look."),
        ("get_weather", {"city": 'Ulm "S"', "days": 3}),
        ("get_weather", {"city": "Bonn"}),
    ],
    "thought and call": [
        ("thinking", "The city is Paris, so get_weather fits."),
        ("get_weather", {"city": "Paris, France"}),
    ],
}


@pytest.mark.parametrize("script", EXPECTED)
def test_a_message_has_what_the_model_says(http: httpx.Client, script: str) -> None:
    found = answer(http, script)
    assert said(found["content"]) == EXPECTED[script]
    assert found["stop_reason"] == ("end_turn" if script == "plain" else "tool_use")
    assert found["model"] == "scripted" and found["id"].startswith("msg_") and found["stop_sequence"] is None
    usage = answer(http, script)["usage"]
    first = found["usage"]
    assert usage["cache_read_input_tokens"] > 0 and usage["output_tokens"] == first["output_tokens"]
    whole = {name: usage[name] + first[name] for name in ("input_tokens", "cache_read_input_tokens")}
    assert sum(whole.values()) == 2 * count(http, script)
    thought = usage["output_tokens_details"]["thinking_tokens"]
    assert (thought > 0) == (script == "thought and call")


def count(http: httpx.Client, script: str, **more: Any) -> int:
    fields = {name: value for name, value in body(script, **more).items() if name not in ("max_tokens", "temperature")}
    response = http.post(f"{MESSAGES}/count_tokens", json=fields)
    assert response.status_code == 200, response.text
    tokens: int = response.json()["input_tokens"]
    return tokens


@pytest.mark.parametrize("script", EXPECTED)
def test_events_come_in_their_order_and_say_the_same(http: httpx.Client, script: str) -> None:
    events = streamed(http, script)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["input_tokens"] >= 0
    blocks: list[dict[str, Any]] = []
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"json": ""})
            continue
        assert event["index"] == len(blocks) - 1
        match event.get("delta"):
            case {"type": "text_delta", "text": text}:
                blocks[-1]["text"] += text
            case {"type": "thinking_delta", "thinking": text}:
                blocks[-1]["thinking"] += text
            case {"type": "signature_delta", "signature": text}:
                blocks[-1]["signature"] = text
            case {"type": "input_json_delta", "partial_json": text}:
                blocks[-1]["json"] += text
            case None:
                assert event["type"] == "content_block_stop"
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"])
    assert said(blocks) == EXPECTED[script]
    whole = answer(http, script)
    assert events[-2]["delta"] == {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_why_it_ended(http: httpx.Client) -> None:
    assert answer(http, "plain", max_tokens=3)["stop_reason"] == "max_tokens"
    found = answer(http, "plain", stop_sequences=["here"])
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "here")
    assert said(found["content"]) == [("text", "Nothing to <do> ")]
    # More than the context holds may be asked for, as Claude Code does.
    assert answer(http, "plain", max_tokens=32000)["stop_reason"] == "end_turn"
    found = answer(http, "plain", max_tokens=32000, ignore_eos=True)
    assert found["stop_reason"] == "model_context_window_exceeded"


def test_thinking_is_shown_where_it_is_asked_for(http: httpx.Client) -> None:
    call = EXPECTED["thought and call"][1:]
    for thinking in (None, {"type": "disabled"}):
        found = answer(http, "thought and call", thinking=thinking)
        assert said(found["content"]) == call
    asked = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    found = answer(http, "thought and call", thinking=asked)
    assert said(found["content"]) == [("thinking", ""), *call]
    events = streamed(http, "thought and call", thinking=asked)
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert deltas[0] == "signature_delta" and "thinking_delta" not in deltas
    assert count(http, "plain") == count(http, "plain", thinking=None) + 1  # the template is told
    # Its signature brings it back.
    turns = [*body("plain")["messages"], {"role": "assistant", "content": found["content"]}]
    result = {"type": "tool_result", "tool_use_id": found["content"][1]["id"], "content": "sunny"}
    sealed = count(http, "plain", messages=[*turns, {"role": "user", "content": [result]}])
    found["content"][0]["thinking"] = "The city is Paris, so get_weather fits."
    assert count(http, "plain", messages=[*turns, {"role": "user", "content": [result]}]) == sealed


def test_conversations_are_those_of_the_chat(http: httpx.Client) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Ulm"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    function = {"name": "get_weather", "arguments": json.dumps({"city": "Ulm"}, separators=(",", ":"))}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "user", "content": "And?"},
    ]
    function = {"description": WEATHER["description"], "name": "get_weather", "parameters": SCHEMA}
    fields: dict[str, Any] = {"messages": chat, "tools": [{"type": "function", "function": function}]}
    fields["chat_template_kwargs"] = {"script": "plain"}
    tokens = http.post("/tokenize", json=fields).json()["count"]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert count(http, "plain", messages=messages, system=system, thinking=None) == tokens
    assert said(answer(http, "plain", messages=messages, system=system)["content"]) == EXPECTED["plain"]


def test_the_beginning_of_an_answer_is_gone_on_with(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "[[plain]]"}]
    assert said(answer(http, "plain", messages=messages)["content"]) == EXPECTED["plain"]


@pytest.mark.parametrize("nothing", ["", []])
def test_an_empty_beginning_of_an_answer_is_none(nothing: Any, http: httpx.Client) -> None:
    question = body("plain")["messages"]
    messages = [*question, {"role": "assistant", "content": nothing}]
    assert count(http, "plain", messages=messages) == count(http, "plain", messages=question)
    assert said(answer(http, "plain", messages=messages)["content"]) == EXPECTED["plain"]


def test_choices_among_tools_and_forms(http: httpx.Client) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        found = answer(http, "forced", tool_choice=choice)
        assert {block["type"] for block in found["content"]} == {"tool_use"} and found["stop_reason"] == "tool_use"
    found = answer(http, "two calls", tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert said(found["content"]) == EXPECTED["two calls"][:2]
    assert said(answer(http, "two calls", tool_choice={"type": "none"})["content"])[0][0] == "text"
    schema = {
        "type": "object",
        "properties": {"town": {"type": "string"}, "size": {"type": "integer"}},
        "required": ["town", "size"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "schema": schema}}
    found = answer(http, "object", tools=[], output_config=form)
    assert json.loads(found["content"][0]["text"]) == {"town": "Wien", "size": 1931}


def test_anthropics_client(client: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"model": "scripted", "max_tokens": 200}
    fields |= {"messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER]}
    found = client.messages.create(**fields, extra_body=extra("two calls"))
    assert [block.type for block in found.content] == ["text", "tool_use", "tool_use"]
    with client.messages.stream(**fields, extra_body=extra("two calls")) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "I look." and final.stop_reason == "tool_use"
    assert [block.input for block in final.content if block.type == "tool_use"] == [
        {"city": 'Ulm "S"', "days": 3},
        {"city": "Bonn"},
    ]
    tokens = client.messages.count_tokens(
        model="scripted",
        messages=fields["messages"],
        tools=fields["tools"],
        extra_body={"chat_template_kwargs": {"script": "two calls"}},
    )
    assert tokens.input_tokens == found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**{**fields, "max_tokens": 0})
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        client.messages.create(**{**fields, "model": "claude"})
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**fields)


def test_models_are_those_of_anthropics_client(client: anthropic.Anthropic, running: Any) -> None:
    (listed,) = client.models.list()
    for model in (listed, client.models.retrieve("scripted")):
        TypeAdapter(ModelInfo).validate_python(model.to_dict(mode="python"), strict=False)
        assert (model.type, model.id, model.display_name) == ("model", "scripted", "scripted")
        assert model.created_at.tzinfo is not None
    assert client.models.list().has_more is False
    plain = httpx.get(f"{running.url}/v1/models", headers={"authorization": f"Bearer {KEY}"}, timeout=None).json()
    assert "type" not in plain["data"][0] and "has_more" not in plain


async def test_anthropics_async_client(running: Any) -> None:
    async with anthropic.AsyncAnthropic(base_url=running.url, auth_token=KEY, max_retries=0) as client:
        fields: dict[str, Any] = {"model": "scripted", "max_tokens": 200}
        fields |= {"messages": [{"role": "user", "content": "Weather?"}], "thinking": {"type": "adaptive"}}
        async with client.messages.stream(**fields, extra_body=extra("thought and call")) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
        assert "thinking" in kinds and "signature" in kinds
        assert final.content[0].type == "thinking" and final.content[0].thinking == EXPECTED["thought and call"][0][1]
        stream = await client.messages.create(**fields, stream=True, extra_body=extra("plain"))
        texts = [event.delta.text async for event in stream if event.type == "content_block_delta"]
        assert "".join(texts) == SCRIPTS["plain"]


def test_errors_have_anthropics_form(running: Any, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    response = http.post(MESSAGES, json=body("plain", messages=[]))
    assert response.status_code == 400
    error = response.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert error["request_id"] == response.headers["x-request-id"]
    nobody = httpx.post(running.url + MESSAGES, json=body("plain"), timeout=None)
    assert (nobody.status_code, nobody.json()["error"]["type"]) == (401, "authentication_error")
    assert http.get(MESSAGES).json()["error"]["type"] == "invalid_request_error"  # 405
    assert "param" in http.post("/v1/chat/completions", json={}).json()["error"]

    async def generate(*_: Any, **__: Any) -> AsyncGenerator[RequestOutput, None]:
        yield RequestOutput("r", None, [], [CompletionOutput(0, "Half", [1])], finished=False)
        raise GenerationFailed("the logits are not finite")

    monkeypatch.setattr(running.engine, "generate", generate)
    last = streamed(http, "plain")[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error" and "not finite" in last["error"]["message"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools.0.name"),
        ({"tools": [{**WEATHER, "input_schema": 1}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages.0.content.0.input"),
        ({"tools": [WEATHER], "system": [{"type": "document"}]}, "system.0.type"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"mcp_servers": [{"type": "url"}]}, "`mcp_servers` is not supported here: tool servers are called"),
        ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "x"}]}, "`tools.0.type`: tool servers are called"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": "x" * 1010}]}, "prompt is too long: 1159 tokens > 1023 maximum"),
        ({"messages": [{"role": "user", "content": "x" * 90000}]}, "tokens > 1024 maximum"),
        ({"temprature": 1}, "temperature"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, more: dict[str, Any], words: str) -> None:
    response = http.post(MESSAGES, json=body("plain", **more))
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"]


def prompt(http: httpx.Client, **more: Any) -> tuple[int, list[str]]:
    """How many tokens a request's prompt has, and what had no effect."""
    response = http.post(f"{MESSAGES}/count_tokens", json={"messages": [{"role": "user", "content": "x"}], **more})
    assert response.status_code == 200, response.text
    ignored = response.headers.get("x-ignored-fields", "")
    return response.json()["input_tokens"], [name for name in ignored.split(",") if name]


CALL = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}}


def with_result(content: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": content}]},
    ]


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PAPER = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "paper"}}
FOUND = {"type": "search_result", "title": "T", "source": "u", "content": [{"type": "text", "text": "found"}]}


@pytest.mark.parametrize(
    ("content", "text", "ignored"),
    [
        ([{"type": "tool_reference", "tool_name": "mcp__x__list"}], "tool: mcp__x__list", 0),
        ([PAPER], "T\npaper", 0),
        ([{**PAPER, "source": {"type": "content", "content": [{"type": "text", "text": "paper"}]}}], "T\npaper", 0),
        ([FOUND, {"type": "text", "text": "!"}], "T\nu\nfound\n!", 0),
        ([PICTURE], "[image: not shown, this model reads text only]", 1),
        ([{**PAPER, "source": {"type": "url"}}], "[document: not shown, this model reads text only]", 1),
        (None, "", 0),
    ],
)
def test_results_are_read_as_text(http: httpx.Client, content: Any, text: str, ignored: int) -> None:
    tokens, unread = prompt(http, messages=with_result(content))
    assert tokens == prompt(http, messages=with_result(text))[0]
    assert unread == ["messages.2.content.0.content.0"] * ignored


def test_tools_of_anthropics_server_that_are_offered_anyway(http: httpx.Client) -> None:
    tools = [
        {"type": "tool_search_tool_regex_20251119", "name": "s"},
        WEATHER,
        {"type": "advisor_20260301", "name": "a"},
    ]
    assert prompt(http, tools=tools) == (prompt(http, tools=[WEATHER])[0], ["tools.0", "tools.2"])


def test_what_other_servers_did_is_left_out_and_told(http: httpx.Client) -> None:
    used = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "tool_search_tool_regex", "input": {}}
    found = {"type": "tool_search_tool_result", "tool_use_id": "srvtoolu_1", "content": {"type": "x"}}
    said = {"type": "text", "text": "Hm."}
    user = {"role": "user", "content": "x"}
    with_it = prompt(http, messages=[user, {"role": "assistant", "content": [used, found, said]}, user])
    assert with_it == (
        prompt(http, messages=[user, {"role": "assistant", "content": "Hm."}, user])[0],
        ["messages.1.content.0", "messages.1.content.1"],
    )


@pytest.mark.parametrize("written", ["{'city': 'Ulm'", ["Ulm"], None, 3, {"arguments": "{"}])
def test_inputs_that_are_no_objects_end_no_conversation(http: httpx.Client, written: Any) -> None:
    messages = with_result("rain")
    messages[1] = {"role": "assistant", "content": [{**CALL, "input": written}]}
    assert prompt(http, messages=messages)[0] > 0
    assert answer(http, "plain", messages=messages)["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    "last",
    [
        [{"type": "text", "text": ""}],
        [{"type": "text", "text": ""}, {"type": "text", "text": ""}],
        [],
        "",
    ],
)
def test_an_empty_last_answer_is_none(http: httpx.Client, last: Any) -> None:
    user = {"role": "user", "content": "x"}
    found = prompt(http, messages=[user, {"role": "assistant", "content": last}])
    assert found == prompt(http, messages=[user])
    begun = [{"type": "text", "text": "Sure"}, *(last if isinstance(last, list) else [])]
    assert prompt(http, messages=[user, {"role": "assistant", "content": begun}]) == prompt(
        http, messages=[user, {"role": "assistant", "content": "Sure"}]
    )


def test_system_messages_may_stand_anywhere(http: httpx.Client) -> None:
    user, system = {"role": "user", "content": "x"}, {"role": "system", "content": "Agents: a, b."}
    assert answer(http, "plain", system="S", messages=[user, system])["stop_reason"] == "end_turn"
    before, _ = prompt(http, system="S", messages=[user])
    assert prompt(http, system="S", messages=[user, system])[0] > before + len("Agents: a, b.") / 2


def billed(cch: str, *, behind: str = "") -> dict[str, Any]:
    header = f"x-anthropic-billing-header: cc_version=2.1.100; cc_entrypoint=cli; cch={cch};{behind}"
    return {"system": [{"type": "text", "text": text} for text in (header, "Be brief. " * 60)]}


def test_what_is_for_billing_keeps_the_prefix_cache(http: httpx.Client) -> None:
    first, second = (answer(http, "plain", **billed(cch))["usage"] for cch in ("1a2b3", "9f8e7"))
    whole = second["input_tokens"] + second["cache_read_input_tokens"]
    assert second["cache_read_input_tokens"] > 0.9 * whole
    assert whole == first["input_tokens"] + first["cache_read_input_tokens"]
    tokens, ignored = prompt(http, **billed("1a2b3"))
    assert ignored == ["system.0"] and tokens == prompt(http, system=billed("")["system"][1]["text"])[0]
    # Only that block, and never what a user says.
    assert prompt(http, **billed("1", behind="\nYou are a bird."))[1] == []
    assert prompt(http, system=billed("1")["system"][::-1])[1] == []
    assert prompt(http, system=billed("1")["system"][0]["text"])[1] == []
    assert prompt(http, messages=[{"role": "user", "content": billed("1")["system"]}])[1] == []


def test_ids_of_calls_are_anthropics(http: httpx.Client) -> None:
    for found in (answer(http, "two calls")["content"], answer(http, "thought and call")["content"]):
        ids = [block["id"] for block in found if block["type"] == "tool_use"]
        assert ids and all(re.fullmatch(r"toolu_[a-zA-Z0-9]{24}", id) for id in ids)
    began = [event["content_block"] for event in streamed(http, "two calls") if "content_block" in event]
    assert all(block["id"].startswith("toolu_") for block in began if block["type"] == "tool_use")


def test_what_has_no_effect_is_told(http: httpx.Client) -> None:
    asked = {"context_management": {"edits": []}, "output_config": {"effort": "high"}}
    response = http.post(MESSAGES, json=body("plain", **asked))
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "context_management,output_config.effort"
