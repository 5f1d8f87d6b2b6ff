"""Tools and reasoning as clients see them: a real server, and a model that says what a script says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from llmjax.config import ServerConfig
from llmjax.errors import ConfigError
from llmjax.serve.answers import OutputFormats
from tests.serve.scripted import END, scripted_engine

CHAT = "/v1/chat/completions"
CONTEXT = 1024
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
SCRIPTS = {
    "plain": "Nothing to <do> here, is there?",
    "two calls": 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm \\"S\\"", "days": 3}}\n'
    '</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>',
    "thought and call": "<think>\nThe city is Paris, so get_weather fits.\n</think>\n\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Paris, France"}}</tool_call>',
    "[THINK]": "So they say hello. I shall greet.\n\n[/THINK] Good day to you!",
    "mistral": 'One moment[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 11}',
    "llama": '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
    "coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nWien\n</parameter>\n<parameter=days>\n5\n"
    "</parameter>\n</function>\n</tool_call>",
    "wrong": '<tool_call>{"day": "Friday"}</tool_call> oh',
    "form": '{"city": "Ulm", "days": 30}',
    "edited": '<tool_call>{"name": "edit", "arguments": {"input": "- \\"old\\"\\n+ new \\u00fc\\n"}}</tool_call>',
}
SPECIAL = ["[TOOL_CALLS]", "<think>", "[THINK]", "[/THINK]"]
BODY = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}|{{ m.name or '' }}|{{ m.tool_call_id or '' }}|{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}"
    "({{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{{ '\n' }}{% endfor %}"
)
PLAY = "{{ '[[' ~ script ~ ']]' }}"
# How a template shows its family is in a comment here; the script is named by the request.
TEMPLATE = "{# <tool_call> <think></think> #}" + BODY + "{% if enable_thinking is defined %}{% endif %}" + PLAY


def template(signs: str) -> dict[str, str]:
    return {"chat_template": "{# " + signs + " #}" + BODY + PLAY}


OTHERS = {
    "mistral": template("[TOOL_CALLS]"),
    "llama": template("<|python_tag|>"),
    "coder": template("<function= <parameter="),
    "[THINK]": {"chat_template": "{# [/THINK] <tool_call> #}" + BODY + "[THINK]"},
}


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
    server, stop = start_server(config, ServerConfig(port=0, trust_request_chat_template=True))
    yield server
    stop()


def body(script: str, **more: Any) -> dict[str, Any]:
    fields = {
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [WEATHER],
        "temperature": 0,
        "chat_template_kwargs": {"script": script},
        **OTHERS.get(script, {}),
    }
    return {**fields, **more}


def answer(http: httpx.Client, script: str, **more: Any) -> dict[str, Any]:
    response = http.post(CHAT, json=body(script, **more))
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate_json(response.content, strict=True)
    found: dict[str, Any] = response.json()
    return found


def deltas(http: httpx.Client, script: str, **more: Any) -> list[dict[str, Any]]:
    with http.stream("POST", CHAT, json=body(script, stream=True, **more)) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    for line in lines:
        ChatCompletionChunk.model_validate_json(line, strict=True)
    return [json.loads(line) for line in lines]


def calls_of(message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    calls = message.get("tool_calls", [])
    assert all(call["type"] == "function" and call["id"] for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


EXPECTED: dict[str, dict[str, Any]] = {
    "plain": {"content": SCRIPTS["plain"], "calls": []},
    "two calls": {
        "content": "I look.",
        "calls": [("get_weather", {"city": 'Ulm "S"', "days": 3}), ("get_weather", {"city": "Bonn"})],
    },
    "thought and call": {
        "content": None,
        "reasoning": "The city is Paris, so get_weather fits.",
        "calls": [("get_weather", {"city": "Paris, France"})],
    },
    "[THINK]": {"content": "Good day to you!", "reasoning": "So they say hello. I shall greet.", "calls": []},
    "mistral": {"content": "One moment", "calls": [("get_weather", {"city": "Rome", "days": 11})]},
    "llama": {"content": None, "calls": [("get_weather", {"city": "Oslo"})]},
    "coder": {"content": None, "calls": [("get_weather", {"city": "Wien", "days": 5})]},
    "wrong": {"content": SCRIPTS["wrong"], "calls": []},
    "form": {"content": SCRIPTS["form"], "calls": []},
    "edited": {"content": None, "calls": [("edit", {"input": '- "old"\n+ new ü\n'})]},
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_answer_has_its_parts(http: httpx.Client, script: str) -> None:
    (choice,) = answer(http, script)["choices"]
    message, expected = choice["message"], EXPECTED[script]
    assert calls_of(message) == expected["calls"]
    assert message["content"] == expected["content"]
    assert message.get("reasoning") == message.get("reasoning_content") == expected.get("reasoning")
    assert choice["finish_reason"] == ("tool_calls" if expected["calls"] else "stop")
    if script == "mistral":
        assert all(re.fullmatch("[a-zA-Z0-9]{9}", call["id"]) for call in message["tool_calls"])


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_has_the_same_parts(http: httpx.Client, script: str, logprobs: bool) -> None:
    chunks = deltas(http, script, logprobs=logprobs, return_token_ids=logprobs, n=2)
    for index in range(2):
        message: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "tool_calls": []}
        tokens = scored = 0
        reason = None
        for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
            delta = choice["delta"]
            for field in ("content", "reasoning", "reasoning_content"):
                message[field] += delta.get(field) or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append(call)
                else:
                    place = message["tool_calls"][call["index"]]["function"]
                    place["arguments"] += call["function"]["arguments"]
            tokens += len(choice.get("token_ids", []))
            scored += len((choice["logprobs"] or {}).get("content", []))
            reason = choice["finish_reason"] or reason
        expected = EXPECTED[script]
        assert calls_of(message) == expected["calls"]
        assert message["content"] == (expected["content"] or "")
        assert message["reasoning"] == message["reasoning_content"] == expected.get("reasoning", "")
        assert reason == ("tool_calls" if expected["calls"] else "stop")
        assert (tokens > 3 and tokens == scored) if logprobs else tokens == 0


def test_arguments_come_as_they_are_written(http: httpx.Client) -> None:
    chunks = deltas(http, "two calls")
    calls = [call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", [])]
    named = [call for call in calls if "id" in call]
    assert [call["function"] for call in named] == [{"name": "get_weather", "arguments": ""}] * 2
    assert len(calls) >= 4  # how many tokens come together is the engine's affair


class GetWeather(BaseModel):
    """Weather of some days."""

    city: str
    days: int


def extra(script: str) -> dict[str, Any]:
    return {"chat_template_kwargs": {"script": script}, **OTHERS.get(script, {})}


def test_openai_parses_calls(client: openai.OpenAI) -> None:
    found = client.chat.completions.parse(
        model="scripted",
        messages=[{"role": "user", "content": "Weather?"}],
        tools=[openai.pydantic_function_tool(GetWeather, name="get_weather")],
        extra_body=extra("mistral"),
        temperature=0,
    )
    calls = found.choices[0].message.tool_calls
    assert calls is not None and calls[0].function.parsed_arguments == GetWeather(city="Rome", days=11)


def test_openai_streams_calls(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="scripted",
        messages=[{"role": "user", "content": "Weather?"}],
        tools=[WEATHER],  # type: ignore[list-item]
        extra_body=extra("two calls"),
        temperature=0,
        stream_options={"include_usage": True},
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [json.loads(event.arguments) for event in done] == [args for _, args in EXPECTED["two calls"]["calls"]]
    assert final.choices[0].finish_reason == "tool_calls" and final.choices[0].message.content == "I look."
    assert final.usage is not None and final.usage.completion_tokens > 10


def test_parallel_calls_can_be_turned_off(http: httpx.Client) -> None:
    (choice,) = answer(http, "two calls", parallel_tool_calls=False)["choices"]
    assert calls_of(choice["message"]) == EXPECTED["two calls"]["calls"][:1]
    chunks = deltas(http, "two calls", parallel_tool_calls=False)
    indices = {call["index"] for chunk in chunks for c in chunk["choices"] for call in c["delta"].get("tool_calls", [])}
    assert indices == {0}


def test_an_answer_of_one_call_ends_with_it(http: httpx.Client) -> None:
    found, whole = (answer(http, "two calls", parallel_tool_calls=several) for several in (False, True))
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert found["usage"]["completion_tokens"] < whole["usage"]["completion_tokens"] - 10


STOPS = {
    "thought and call": ["Paris", "arguments"],  # in thoughts and in the call
    "two calls": ["look.\n", "Ulm"],
    "wrong": ["day", "oh"],
}


@pytest.mark.parametrize("script", STOPS)
def test_stop_strings_hold_for_content_alone(http: httpx.Client, script: str) -> None:
    (choice,) = answer(http, script, stop=STOPS[script])["choices"]
    if script == "wrong":  # what is not a call is content
        assert (choice["message"]["content"], choice["stop_reason"]) == ('<tool_call>{"', "day")
        return
    if script == "two calls":
        assert (choice["message"]["content"], choice["stop_reason"]) == ("I ", "look.\n")
        return
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    assert calls_of(choice["message"]) == EXPECTED[script]["calls"]
    assert choice["message"].get("reasoning") == EXPECTED[script].get("reasoning")


def strict(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}


ARGUMENTS: dict[str, Any] = {
    "$defs": {"days": {"enum": [1, 2, 30]}},
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORCED = [strict("get_weather", ARGUMENTS), strict("stop", {"type": "object", "additionalProperties": False})]


@pytest.mark.parametrize("script", ["plain", "mistral", "llama", "coder"])
@pytest.mark.parametrize("named", [False, True])
def test_calls_can_be_forced(named: bool, script: str, http: httpx.Client) -> None:
    """Whatever the model would say, and however its family writes calls."""
    choice = {"type": "function", "function": {"name": "get_weather"}} if named else "required"
    options = {"tools": FORCED, "temperature": 1, "max_tokens": 300, "parallel_tool_calls": False}
    for seed in range(2):
        (found,) = answer(http, script, tool_choice=choice, seed=seed, **options)["choices"]
        assert found["finish_reason"] == "tool_calls" and not found["message"]["content"]
        ((name, arguments),) = calls_of(found["message"])
        assert name in (["get_weather"] if named else ["get_weather", "stop"])
        jsonschema.validate(arguments, ARGUMENTS if name == "get_weather" else {"maxProperties": 0})


FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": ARGUMENTS, "strict": True}}


def test_a_form_is_of_what_is_said_and_leaves_calls_to_the_model(http: httpx.Client) -> None:
    """An answer is, as at OpenAI, a call, or content that has the form."""
    one = {"response_format": FORM, "tools": FORCED, "parallel_tool_calls": False, "max_tokens": 300}
    for script in ("thought and call", "llama", "coder"):
        (found,) = answer(http, script, **one)["choices"]
        assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None
        ((name, arguments),) = calls_of(found["message"])
        assert name == "get_weather" and found["message"].get("reasoning") == EXPECTED[script].get("reasoning")
        if script == "coder":  # what is not JSON is the model's own
            assert arguments == {"city": "Wien", "days": 5}
        else:
            jsonschema.validate(arguments, ARGUMENTS)
        streamed = [chunk["choices"][0] for chunk in deltas(http, script, **one)]
        assert streamed[-1]["finish_reason"] == "tool_calls"
    (found,) = answer(http, "form", response_format=FORM)["choices"]
    assert (found["message"]["content"], found["finish_reason"]) == (SCRIPTS["form"], "stop")
    for script in ("plain", "mistral", "llama", "coder"):  # most of these would say something else
        for seed in range(3):
            (found,) = answer(http, script, **one, temperature=1, seed=seed)["choices"]
            if found["finish_reason"] == "stop":
                jsonschema.validate(json.loads(found["message"]["content"]), ARGUMENTS)
            elif found["finish_reason"] == "tool_calls":
                assert not found["message"]["content"] and found["message"]["tool_calls"]


def test_a_form_beside_calls_is_rendered(http: httpx.Client) -> None:
    rendered = http.post(f"{CHAT}/render", json=body("form", tools=FORCED, response_format=FORM, max_tokens=60)).json()
    wanted = rendered["sampling_params"]["structured_outputs"]
    assert "get_weather" in wanted["instead"]["structural_tag"]
    fields = {name: rendered[name] for name in ("token_ids", "sampling_params")}
    answered = http.post("/inference/v1/generate", json={**fields, "output_mode": "text"}).json()
    assert answered["choices"][0]["text"] == SCRIPTS["form"]
    nested = {"regex": "a", "instead": {"regex": "b", "instead": {"regex": "c"}}}
    error = http.post(CHAT, json=body("plain", tools=None, structured_outputs=nested)).json()["error"]
    assert error["param"] == "structured_outputs.instead.instead"


def test_a_forced_call_has_no_content_that_could_have_a_form(http: httpx.Client) -> None:
    more = {"tools": FORCED, "tool_choice": "required", "response_format": FORM, "max_tokens": 300}
    (found,) = answer(http, "plain", **more)["choices"]
    assert found["finish_reason"] == "tool_calls" and calls_of(found["message"])
    wrong = {"type": "json_schema", "json_schema": {"name": "x"}}
    error = http.post(CHAT, json=body("plain", **{**more, "response_format": wrong})).json()["error"]
    assert error["param"] == "response_format.json_schema.schema"


def test_several_calls_can_be_forced(http: httpx.Client) -> None:
    for script in ("plain", "coder"):
        options = {"tools": FORCED[1:], "tool_choice": "required", "max_tokens": 150, "temperature": 1}
        found = [answer(http, script, seed=seed, **options)["choices"][0] for seed in range(4)]
        assert all(choice["message"]["tool_calls"] for choice in found)
        assert any(len(choice["message"]["tool_calls"]) > 1 for choice in found)


def test_a_model_thinks_before_a_forced_call_and_before_a_form(http: httpx.Client) -> None:
    expected = EXPECTED["thought and call"]["reasoning"]
    (found,) = answer(http, "thought and call", tools=FORCED, tool_choice="required", max_tokens=300)["choices"]
    assert found["message"]["reasoning"] == expected
    assert calls_of(found["message"])[0][0] == "get_weather"
    (found,) = answer(http, "thought and call", tools=None, guided_choice=["yes", "no"], max_tokens=100)["choices"]
    assert (found["message"]["reasoning"], found["finish_reason"]) == (expected, "stop")
    assert found["message"]["content"] in ("yes", "no")
    (found,) = answer(http, "[THINK]", tools=None, guided_choice=["yes", "no"], max_tokens=100)["choices"]
    assert found["message"]["reasoning"].startswith("So they say hello")
    assert found["message"]["content"] in ("yes", "no")


def test_strict_tools_leave_the_choice_and_hold_the_call_to_its_schema(http: httpx.Client) -> None:
    (found,) = answer(http, "plain", tools=FORCED)["choices"]
    assert found["message"]["content"] == SCRIPTS["plain"]
    (found,) = answer(http, "two calls", tools=FORCED, max_tokens=200)["choices"]
    assert found["message"]["content"] == "I look."
    name, arguments = calls_of(found["message"])[0]
    assert name == "get_weather" and arguments["days"] in (1, 2, 30)  # it would say 3, and a longer city
    jsonschema.validate(arguments, ARGUMENTS)


def test_without_tools_calls_are_text(http: httpx.Client) -> None:
    for more in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        (choice,) = answer(http, "two calls", **more)["choices"]
        assert choice["message"]["content"] == SCRIPTS["two calls"] and "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


def test_reasoning_is_counted_and_can_be_left_out(http: httpx.Client) -> None:
    found = answer(http, "thought and call", return_token_ids=True, include_reasoning=False)
    usage = found["usage"]
    assert "reasoning" not in found["choices"][0]["message"]
    thought = EXPECTED["thought and call"]["reasoning"]
    details = usage["completion_tokens_details"]["reasoning_tokens"]
    assert len(thought) / 4 < details < len(thought) / 2, "tokens have about three characters"
    assert details < usage["completion_tokens"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = deltas(http, "thought and call", stream_options=options, include_reasoning=False)
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks[1:]]
    assert counts == sorted(counts) and counts[-1] == details
    assert not any("reasoning" in choice["delta"] for chunk in chunks for choice in chunk["choices"])
    assert "completion_tokens_details" not in answer(http, "llama")["usage"], "a model that does not reason"


def test_a_cut_answer_has_what_there_is(http: httpx.Client) -> None:
    (choice,) = answer(http, "thought and call", max_tokens=6)["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] is None
    assert EXPECTED["thought and call"]["reasoning"].startswith(choice["message"]["reasoning"])
    (choice,) = answer(http, "llama", max_tokens=13)["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert '{"city": "Oslo"}'.startswith(call["function"]["arguments"])


@pytest.mark.parametrize(("script", "stop"), [("two calls", "Ulm"), ("llama", "slo"), ("coder", "days")])
def test_a_stop_string_within_a_call_is_part_of_it(http: httpx.Client, script: str, stop: str) -> None:
    (choice,) = answer(http, script, stop=stop)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    assert calls_of(choice["message"]) == EXPECTED[script]["calls"]
    chunks = [chunk["choices"][0] for chunk in deltas(http, script, stop=stop)]
    assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == ("tool_calls", None)


def test_a_stop_token_within_a_call_leaves_none_to_run(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": SCRIPTS["llama"], "add_special_tokens": False}).json()["tokens"]
    token = next(token for token in reversed(ids[:-2]) if ids.count(token) == 1)
    (choice,) = answer(http, "llama", stop_token_ids=[token])["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)
    (call,) = choice["message"]["tool_calls"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["function"]["arguments"])


def test_a_call_that_the_model_does_not_complete_is_for_the_client_to_answer(http: httpx.Client) -> None:
    (end,) = http.post("/tokenize", json={"prompt": END, "add_special_tokens": False}).json()["tokens"]
    early = {"min_tokens": 13, "logit_bias": {str(end): 100}}  # there the model ends by itself
    (choice,) = answer(http, "llama", **early)["choices"]
    (call,) = choice["message"]["tool_calls"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["function"]["arguments"])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    assert deltas(http, "llama", **early)[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("budget", [0, 1, 5, 40])
def test_thinking_ends_at_its_budget(http: httpx.Client, budget: int) -> None:
    unbounded = answer(http, "[THINK]", return_token_ids=True)
    (free,) = unbounded["choices"]
    found = answer(http, "[THINK]", thinking_token_budget=budget, return_token_ids=True)
    (choice,) = found["choices"]
    thought = EXPECTED["[THINK]"]["reasoning"]
    assert choice["message"]["content"] == EXPECTED["[THINK]"]["content"] and choice["finish_reason"] == "stop"
    tokens = found["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert found["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert found["usage"]["prompt_tokens"] == unbounded["usage"]["prompt_tokens"]
    if budget == 40:
        assert choice["token_ids"] == free["token_ids"] and choice["message"]["reasoning"] == thought
    else:
        assert tokens == budget and thought.startswith(choice["message"].get("reasoning", ""))
        assert choice["token_ids"][:budget] == free["token_ids"][:budget]
    chunks = deltas(http, "[THINK]", thinking_token_budget=budget, return_token_ids=True)
    pieces = [c for chunk in chunks for c in chunk["choices"]]
    assert [i for c in pieces for i in c.get("token_ids", [])] == choice["token_ids"]
    assert "".join(c["delta"].get("content") or "" for c in pieces) == choice["message"]["content"]
    assert "".join(c["delta"].get("reasoning") or "" for c in pieces) == choice["message"].get("reasoning", "")
    assert [c["finish_reason"] for c in pieces if c["finish_reason"]] == ["stop"]


@pytest.mark.parametrize("budget", [-1, 0, 1, 5, 9, 13, 40])
def test_a_form_behind_thinking_that_has_a_budget(http: httpx.Client, budget: int) -> None:
    """Whether the first request ends in the reasoning, or in what has the form."""
    forms = ["Good day.", "Good evening to all of you."]
    fields = {"thinking_token_budget": budget, "guided_choice": forms, "max_tokens": 60, "tools": None}
    found = answer(http, "[THINK]", **fields)
    (choice,) = found["choices"]
    assert choice["message"]["content"] in forms and choice["finish_reason"] == "stop"
    assert EXPECTED["[THINK]"]["reasoning"].startswith(choice["message"].get("reasoning", ""))
    if 0 <= budget < 10:
        assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget
    pieces = [c["delta"] for chunk in deltas(http, "[THINK]", **fields) for c in chunk["choices"]]
    assert "".join(piece.get("content") or "" for piece in pieces) == choice["message"]["content"]


def test_a_forced_call_behind_thinking_that_has_a_budget(http: httpx.Client) -> None:
    fields = {"thinking_token_budget": 3, "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = answer(http, "thought and call", **fields)["choices"]
    ((name, _),) = calls_of(choice["message"])
    assert name == "get_weather" and len(choice["message"]["reasoning"]) < 20


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_scores_and_penalties_of_an_answer_whose_thinking_has_a_budget(http: httpx.Client, budget: int) -> None:
    """The end of the reasoning is sampled under masks there, token by token."""
    fields = {"thinking_token_budget": budget, "return_token_ids": True, "seed": 3}
    (plain,) = answer(http, "[THINK]", **fields)["choices"]
    found = answer(http, "[THINK]", **fields, logprobs=True, top_logprobs=2, n=2, best_of=3)["choices"]
    assert [choice["index"] for choice in found] == [0, 1]
    for choice in found:
        assert choice["token_ids"] == plain["token_ids"]  # the script leaves no choice
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        assert all(entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])
    (penalized,) = answer(http, "[THINK]", **fields, frequency_penalty=0.001)["choices"]
    assert penalized["token_ids"] == plain["token_ids"]


def test_each_continuation_thinks_within_the_budget(http: httpx.Client) -> None:
    fields = {"thinking_token_budget": 5, "n": 3, "seed": 4, "return_token_ids": True}
    found = answer(http, "[THINK]", **fields)
    (alone,) = answer(http, "[THINK]", **{**fields, "n": 1})["choices"]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert found["choices"][0]["token_ids"] == alone["token_ids"]
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == 15
    assert found["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in found["choices"])
    pieces = [c for chunk in deltas(http, "[THINK]", **fields) for c in chunk["choices"]]
    for choice in found["choices"]:
        own = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert [i for piece in own for i in piece.get("token_ids", [])] == choice["token_ids"]
        assert "".join(piece["delta"].get("content") or "" for piece in own) == choice["message"]["content"]
        assert [piece["finish_reason"] for piece in own if piece["finish_reason"]] == ["stop"]


def test_a_budget_above_what_may_be_said(http: httpx.Client) -> None:
    for budget in (2, 3, 4, 9):
        (choice,) = answer(http, "[THINK]", thinking_token_budget=budget, max_tokens=4, return_token_ids=True)[
            "choices"
        ]
        assert len(choice["token_ids"]) == 4 and choice["finish_reason"] == "length"


def test_a_budget_for_reasoning_that_the_model_opens(http: httpx.Client) -> None:
    found = answer(http, "thought and call", thinking_token_budget=4)
    assert 0 < found["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 5
    assert EXPECTED["thought and call"]["reasoning"].startswith(found["choices"][0]["message"]["reasoning"])
    (choice,) = answer(http, "two calls", thinking_token_budget=4)["choices"]
    assert calls_of(choice["message"]) == EXPECTED["two calls"]["calls"], "who does not think is not interrupted"


def prompt_of(http: httpx.Client, messages: list[dict[str, Any]], **more: Any) -> str:
    response = http.post("/tokenize", json={"messages": messages, "chat_template_kwargs": {"script": "plain"}, **more})
    assert response.status_code == 200, response.text
    text: str = http.post("/detokenize", json={"tokens": response.json()["tokens"]}).json()["prompt"]
    return text


def test_history_with_calls(http: httpx.Client) -> None:
    (choice,) = answer(http, "two calls")["choices"]
    calls = choice["message"]["tool_calls"]
    messages = [
        {"role": "user", "content": "Weather?"},
        choice["message"],
        *({"role": "tool", "tool_call_id": call["id"], "content": f"{i}°"} for i, call in enumerate(calls)),
    ]
    text = prompt_of(http, messages, tools=[WEATHER])
    ids = [call["id"] for call in calls]
    assert json.loads(text.splitlines()[0]) == WEATHER
    assert text.splitlines()[2:5] == [
        f'assistant|||I look.({ids[0]} get_weather {{"city": "Ulm \\"S\\"", "days": 3}})'
        f'({ids[1]} get_weather {{"city": "Bonn"}})',
        f"tool|get_weather|{ids[0]}|0°",
        f"tool|get_weather|{ids[1]}|1°",
    ]
    assert answer(http, "plain", messages=messages)["choices"][0]["message"]["content"] == SCRIPTS["plain"]


EDIT: dict[str, Any] = {"type": "custom", "custom": {"name": "edit", "description": "Changes files"}}


def test_half_a_surrogate_pair_in_history(http: httpx.Client) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Ulm\\ud83d"}'}
    call = {"id": "c1", "type": "function", "function": function}
    messages = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "tool_calls": [call]}]
    found = answer(http, "plain", messages=messages, return_prompt_text=True)
    assert '(c1 get_weather {"city": "Ulm\ufffd"})' in found["prompt_text"]


def test_custom_tools(http: httpx.Client) -> None:
    text = '- "old"\n+ new ü\n'
    (choice,) = answer(http, "edited", tools=[WEATHER, EDIT])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call == {"id": call["id"], "type": "custom", "custom": {"name": "edit", "input": text}} and call["id"]
    with http.stream("POST", CHAT, json=body("edited", stream=True, tools=[WEATHER, EDIT])) as response:
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    first, *rest = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert (first["index"], first["type"], first["custom"]) == (0, "custom", {"name": "edit", "input": ""})
    assert all(call.keys() == {"index", "custom"} for call in rest)
    assert "".join(call["custom"]["input"] for call in rest) == text
    messages = [
        {"role": "user", "content": "Change it"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "done"},
    ]
    prompt = prompt_of(http, messages, tools=[EDIT])
    assert f"({call['id']} edit " in prompt
    assert f"tool|edit|{call['id']}|done" in prompt


def test_formats_of_custom_tools(http: httpx.Client) -> None:
    lines = {"syntax": "lark", "definition": 'start: LINE~1..2\nLINE: /"[a-z]{1,3}"\\n/'}
    digits = {"syntax": "regex", "definition": "[0-9]{3,5}"}
    for grammar, expected in ((lines, '("[a-z]{1,3}"\n){1,2}'), (digits, "[0-9]{3,5}")):
        tool = {"type": "custom", "custom": {**EDIT["custom"], "format": {"type": "grammar", "grammar": grammar}}}
        named = {"type": "custom", "custom": {"name": "edit"}}
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
        for script, choice in (("plain", named), ("coder", allowed), ("mistral", "required"), ("edited", "auto")):
            options = {"tools": [WEATHER, tool] if choice != "required" else [tool], "tool_choice": choice}
            (found,) = answer(http, script, **options, temperature=1, seed=3, max_tokens=300)["choices"]
            assert found["finish_reason"] == "tool_calls", (script, found)
            assert all(re.fullmatch(expected, call["custom"]["input"]) for call in found["message"]["tool_calls"])
    told = http.post(CHAT, json=body("coder", tools=[tool], max_tokens=3))  # a family that writes no JSON
    assert told.headers["x-ignored-fields"] == "tools.0.custom.format"


def test_functions_are_tools_of_which_one_is_called(http: httpx.Client) -> None:
    """OpenAI's older form, whole and streamed."""
    older = {"tools": None, "functions": [WEATHER["function"]], "function_call": "auto"}
    (choice,) = answer(http, "two calls", **older)["choices"]
    name, arguments = EXPECTED["two calls"]["calls"][0]
    called = choice["message"]["function_call"]
    assert (called["name"], json.loads(called["arguments"])) == (name, arguments)
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "function_call"
    streamed = [choice for chunk in deltas(http, "two calls", **older) for choice in chunk["choices"]]
    parts = [choice["delta"]["function_call"] for choice in streamed if "function_call" in choice["delta"]]
    assert parts[0] == {"name": name, "arguments": ""}
    assert json.loads("".join(part["arguments"] for part in parts)) == arguments
    assert streamed[-1]["finish_reason"] == "function_call"
    (choice,) = answer(http, "two calls", **{**older, "function_call": "none"})["choices"]
    assert "function_call" not in choice["message"] and choice["finish_reason"] == "stop"


def test_function_messages_are_those_of_tools(http: httpx.Client) -> None:
    call = {"name": "get_weather", "arguments": "{}"}
    user = {"role": "user", "content": "x"}
    older = [user, {"role": "assistant", "function_call": call}, {"role": "function", "name": "f", "content": "1"}]
    newer = [
        user,
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "name": "f", "content": "1"},
    ]
    assert prompt_of(http, older) == prompt_of(http, newer)


def test_content_beside_calls_may_be_null(http: httpx.Client) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert "assistant|||(c get_weather {})" in prompt_of(http, [{"role": "user", "content": "x"}, message])


BROKEN = [
    ('{"city": "Ulm', '{"arguments": "{\\"city\\": \\"Ulm"}'),
    ("{'city': 'Ulm',}", '{"city": "Ulm"}'),
    ('```json\n{"city": "Ulm"}\n```', '{"city": "Ulm"}'),
    ('{"city": "Ulm\nWest"}', '{"city": "Ulm\\nWest"}'),
    ('{"city": "\\ud83d", "n": NaN}', '{"city": "\ufffd", "n": NaN}'),
    ([1], '{"arguments": "[1]"}'),
    (None, "{}"),
]


@pytest.mark.parametrize(("written", "shown"), BROKEN, ids=str)
def test_arguments_that_are_not_json_end_no_conversation(http: httpx.Client, written: Any, shown: str) -> None:
    function = {"name": "get_weather", "arguments": written}
    user, result = {"role": "user", "content": "x"}, {"role": "tool", "name": "get_weather", "content": "1"}
    newer = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    prompt = prompt_of(http, [user, newer, result, user])
    assert f" get_weather {shown})" in prompt
    older = {"role": "assistant", "content": None, "function_call": function}
    assert prompt_of(http, [user, older, {**result, "role": "function"}, user]) == prompt


def test_pictures_in_results_are_noted(http: httpx.Client) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    seen = [{"type": "text", "text": "seen"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": seen},
    ]
    assert "seen\n[image_url: not shown, this model reads text only]" in prompt_of(http, messages)


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{{ m.role }}|{{ m.content }};{% endfor %}"
)


def test_system_messages_may_stand_anywhere(http: httpx.Client) -> None:
    roles = ("system", "system", "user", "assistant", "user", "developer", "user")
    messages = [{"role": role, "content": letter} for role, letter in zip(roles, "ABCDEFG", strict=True)]
    found = answer(http, "plain", messages=messages, tools=None, chat_template=STRICT + PLAY, return_token_ids=True)
    text = http.post("/detokenize", json={"tokens": found["prompt_token_ids"]}).json()["prompt"]
    assert text.split("[[")[0] == "system|A\n\nB;user|C;assistant|D;user|E\n\n<system>\nF\n</system>;user|G;"


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, "True"),
        ({"type": "adaptive"}, "True"),
        ({"type": "disabled"}, "False"),
        (True, "True"),
    ],
)
def test_thinking_is_switched_as_at_anthropic(http: httpx.Client, thinking: Any, shown: str) -> None:
    switch = {"chat_template": "{# <think></think> #}{{ enable_thinking is defined and enable_thinking }}" + PLAY}
    found = answer(http, "plain", tools=None, thinking=thinking, return_token_ids=True, **switch)
    text = http.post("/detokenize", json={"tokens": found["prompt_token_ids"]}).json()["prompt"]
    assert text == f"{shown}[[plain]]"


ODD_TEXT = {"type": "string", "pattern": "^(?!a)", "maxLength": 8}
ODD = {"name": "odd", "parameters": {"type": "object", "properties": {"x": ODD_TEXT}}}


def test_one_odd_schema_refuses_no_calls(http: httpx.Client) -> None:
    """The form is made whichever tool is forced; one that is strict is refused by its place."""
    tools = [FORCED[1], {"type": "function", "function": ODD}]
    options = {"tool_choice": "required", "temperature": 1, "max_tokens": 300, "parallel_tool_calls": False}
    for seed in range(4):
        (choice,) = answer(http, "plain", tools=tools, seed=seed, **options)["choices"]
        ((name, arguments),) = calls_of(choice["message"])
        assert name in ("stop", "odd") and len(arguments.get("x", "")) <= 8
    tools[1] = {"type": "function", "function": {**ODD, "strict": True}}
    response = http.post(CHAT, json=body("plain", tools=tools, tool_choice="required"))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools.1.function.parameters")
    assert "'odd': properties.x.pattern: look-around" in error["message"]


def test_a_form_that_never_ends_is_refused(http: httpx.Client) -> None:
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    response = http.post(CHAT, json=body("plain", tools=None, response_format=wanted))
    assert response.status_code == 400 and response.json()["error"]["param"] == "response_format"


PLAIN = {"chat_template": "{% for m in messages %}{{ m.role }}|{{ m.content }};{% endfor %}" + PLAY}


def test_a_model_without_tools_in_its_template_is_told_in_words(http: httpx.Client) -> None:
    (choice,) = answer(http, "two calls", **PLAIN)["choices"]
    assert calls_of(choice["message"]) == EXPECTED["two calls"]["calls"]
    calls = choice["message"]["tool_calls"]
    messages = [
        {"role": "user", "content": "Weather?"},
        choice["message"],
        *({"role": "tool", "tool_call_id": call["id"], "content": f"{i} C"} for i, call in enumerate(calls)),
    ]
    found = answer(http, "plain", messages=messages, return_token_ids=True, **PLAIN)
    text = http.post("/detokenize", json={"tokens": found["prompt_token_ids"]}).json()["prompt"]
    system, *rest = text.split(";")
    assert system.startswith("system|") and json.dumps(WEATHER["function"]) in system
    assert rest[:3] == [
        "user|Weather?",
        'assistant|I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm \\"S\\"", "days": 3}}\n'
        '</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>',
        "user|<tool_response>\n0 C\n</tool_response>\n<tool_response>\n1 C\n</tool_response>",
    ]


def test_effort_reaches_templates_that_read_it(http: httpx.Client) -> None:
    effort = {"chat_template": "{# <|channel|><|message|> #}{{ reasoning_effort }}" + PLAY}
    prompt = answer(http, "plain", tools=None, reasoning_effort="high", return_token_ids=True, **effort)
    text = http.post("/detokenize", json={"tokens": prompt["prompt_token_ids"]}).json()["prompt"]
    assert text == "high[[plain]]"
    switch = {"chat_template": "{{ enable_thinking is defined and enable_thinking }}" + PLAY}
    for effort_word, shown in (("none", "False"), ("low", "True")):
        prompt = answer(http, "plain", tools=None, reasoning_effort=effort_word, return_token_ids=True, **switch)
        text = http.post("/detokenize", json={"tokens": prompt["prompt_token_ids"]}).json()["prompt"]
        assert text == f"{shown}[[plain]]"


DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"items": DEEP}


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": fields}]}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "required", "guided_regex": "a+"}, "guided_regex", "`tool_choice` forces"),
    (
        {"tool_choice": "required", "tools": [strict("f", {"type": "string", "pattern": "(?=a)"})]},
        "tools.0.function.parameters",
        "look-around",
    ),
    ({"tools": [strict("f", {"not": {}})]}, "tools.0.function.parameters", "not"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "not among"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "not among"),
    ({"tool_choice": "sometimes"}, "tool_choice", "must be"),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "needs `tools`"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "only functions"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "object"),
    ({"tools": [{"type": "custom"}]}, "tools.0.custom", "a name"),
    ({"tools": [{"type": "custom", "custom": {"name": "a", "format": 1}}]}, "tools.0.custom.format", "of type text"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "other"}}}, "tool_choice", "not among"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
        "messages.0.tool_calls.0.custom",
        "input",
    ),
    (function(name=""), "tools.0.function.name", "name"),
    (function(name="a b"), "tools.0.function.name", "without spaces"),
    (function(name="a" * 257), "tools.0.function.name", "256"),
    (function(name="a", parameters=[]), "tools.0.function.parameters", "an object"),
    (function(name="a", description=1), "tools.0.function.description", "a string"),
    (function(name="a", strict="yes"), "tools.0.function.strict", "a boolean"),
    (function(name="a", parameters=DEEP), "tools.0.function.parameters", "deeper than 64"),
    (function(name="a", description="d" * 2**20), "tools", "bytes"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "two functions"),
    ({"tools": [WEATHER] * 513}, "tools", "at most 512"),
    ({"tools": "x"}, "tools", "list"),
    ({"tools": [1]}, "tools.0", "dict"),
    ({"chat_template": "{{ tools }}"}, "tools", "--tool-call-parser"),
    ({"chat_template": "{{ 1 }}", "tools": None, "reasoning_effort": "low"}, "reasoning_effort", "does not read it"),
    ({"thinking_token_budget": -2}, "thinking_token_budget", "greater than or equal to -1"),
    ({"thinking_token_budget": 5, "use_beam_search": True}, "thinking_token_budget", "use_beam_search"),
    ({"thinking_token_budget": 5, **template("<tool_call>")}, "thinking_token_budget", "--reasoning-parser"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "none"),
    ({"include_reasoning": 1}, "include_reasoning", "boolean"),
    ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages.0.tool_calls", "list"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0", "function"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}] * 1025}]}, "messages.0.tool_calls", "at most 1024"),
    ({"messages": [{"role": "tool", "tool_call_id": 1, "content": "x"}]}, "messages.0.tool_call_id", "string"),
    ({"messages": [{"role": "assistant", "function_call": 1}]}, "messages.0.function_call.0", "function"),
]


@pytest.mark.parametrize(("change", "param", "says"), BAD, ids=lambda value: str(value)[:40])
def test_bad_field(http: httpx.Client, change: dict[str, Any], param: str, says: str) -> None:
    response = http.post(CHAT, json=body("plain", **change))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and says in error["message"], error


def test_parsers_can_be_named() -> None:
    def parsers(template: str, **settings: Any) -> tuple[str | None, str | None]:
        found = OutputFormats(None, ServerConfig(**settings)).parsers(template)
        return found.tools, found.reasoning

    assert parsers(TEMPLATE) == ("hermes", "think")
    assert parsers(TEMPLATE, tool_call_parser="none", reasoning_parser="none") == (None, None)
    assert parsers("", tool_call_parser="phi4_mini_json", reasoning_parser="openai_gptoss") == ("phi4", "harmony")
    with pytest.raises(ConfigError, match="tool_call_parser 'hermis' is not known; did you mean hermes"):
        OutputFormats(None, ServerConfig(tool_call_parser="hermis"))
    with pytest.raises(ConfigError, match="reasoning_parser 'x' is not known"):
        OutputFormats(None, ServerConfig(reasoning_parser="x"))
