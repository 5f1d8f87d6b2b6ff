"""POST /v1/chat/completions against openai's own client and types."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

pytestmark = [pytest.mark.jax_api, pytest.mark.smoke]

MODEL = "tiny-llama"
HELLO: list[Any] = [{"role": "user", "content": "Hello the world"}]
GREEDY: dict[str, Any] = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 12}
NO_EOS: dict[str, Any] = {"extra_body": {"ignore_eos": True}}


def stream_events(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The decoded chunks of a stream; checks its frame."""
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_answer_is_a_strict_chat_completion(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json={**GREEDY, "ignore_eos": True})
    assert response.status_code == 200
    answer = ChatCompletion.model_validate_json(response.content, strict=True)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length"
    assert answer.model == MODEL and answer.id.startswith("chatcmpl-") and answer.system_fingerprint
    assert answer.usage is not None and answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.prompt_tokens_details is not None
    tokens = http.post("/tokenize", json={"messages": HELLO}).json()["count"]
    assert answer.usage.prompt_tokens == tokens


@pytest.mark.parametrize("extra", [{}, {"stop": ["a"]}, {"n": 3, "temperature": 1, "seed": 5}, {"logprobs": True}])
def test_stream_equals_whole(http: httpx.Client, extra: dict[str, Any]) -> None:
    body = {**GREEDY, "max_tokens": 40, **extra}
    whole = http.post("/v1/chat/completions", json=body).json()
    texts = {choice["index"]: "" for choice in whole["choices"]}
    reasons: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {index: [] for index in texts}
    for data in stream_events(http, body):
        ChatCompletionChunk.model_validate_json(json.dumps(data), strict=True)
        for choice in data["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
            logprobs[choice["index"]] += (choice["logprobs"] or {}).get("content", [])
            if choice["finish_reason"]:
                assert choice["index"] not in reasons
                reasons[choice["index"]] = choice["finish_reason"]
    for choice in whole["choices"]:
        assert texts[choice["index"]] == choice["message"]["content"]
        assert reasons[choice["index"]] == choice["finish_reason"]
        if extra.get("logprobs"):
            assert [entry["token"] for entry in logprobs[choice["index"]]] == [
                entry["token"] for entry in choice["logprobs"]["content"]
            ]


def test_stream_begins_with_roles_and_ends_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(**GREEDY, n=2, stream=True, stream_options={"include_usage": True}, **NO_EOS)
    )
    assert [(c.choices[0].index, c.choices[0].delta.role) for c in chunks[:2]] == [(0, "assistant"), (1, "assistant")]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 24
    assert len({chunk.id for chunk in chunks}) == 1 and len({chunk.created for chunk in chunks}) == 1
    ends = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].finish_reason]
    assert sorted(choice.index for choice in ends) == [0, 1]
    assert all(choice.delta.content is None for choice in ends)


def test_continuous_usage_counts_up(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream_events(http, {**GREEDY, "ignore_eos": True, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 12


def test_logprobs(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**GREEDY, top_logprobs=0, reasoning_effort="none", **NO_EOS)
    assert plain.choices[0].logprobs is None  # and none is what it thinks anyway
    answer = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3, **NO_EOS)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 12
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True) and max(values) <= 0
        assert entry.logprob == values[0], "greedy takes the most probable token"
        assert entry.bytes is not None and bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    text = b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode("utf-8", "replace")
    assert text == answer.choices[0].message.content


def test_token_ids_and_prompt_logprobs(http: httpx.Client) -> None:
    body = {**GREEDY, "return_token_ids": True, "prompt_logprobs": 1, "logprobs": True, "ignore_eos": True}
    body["return_tokens_as_token_ids"] = True
    answer = http.post("/v1/chat/completions", json=body).json()
    ids = answer["choices"][0]["token_ids"]
    assert len(ids) == 12
    assert [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]] == [f"token_id:{i}" for i in ids]
    prompt = answer["prompt_token_ids"]
    assert len(prompt) == answer["usage"]["prompt_tokens"] == len(answer["prompt_logprobs"])
    assert answer["prompt_logprobs"][0] is None
    for token, position in zip(prompt[1:], answer["prompt_logprobs"][1:], strict=True):
        assert str(token) in position and position[str(token)]["logprob"] <= 0


def test_seed_repeats_and_differs(client: openai.OpenAI) -> None:
    def answer(seed: int) -> str | None:
        body = {**GREEDY, "temperature": 1.0, "seed": seed}
        return client.chat.completions.create(**body, **NO_EOS).choices[0].message.content

    assert answer(1) == answer(1) != answer(2)


def test_default_max_tokens_fill_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, **NO_EOS)
    assert answer.usage is not None and answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_stop_string(http: httpx.Client) -> None:
    body = {**GREEDY, "max_tokens": 40, "ignore_eos": True}
    text = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    stop = next(c for c in text[3:] if c.isascii() and c not in text[:3])
    choice = http.post("/v1/chat/completions", json={**body, "stop": stop}).json()["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop
    assert choice["message"]["content"] == text.split(stop)[0]


def test_content_parts_developer_and_older_names(http: httpx.Client) -> None:
    def count(messages: list[Any]) -> list[int]:
        tokens: list[int] = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        return tokens

    parts = [{"type": "text", "text": "Hello"}, {"type": "input_text", "text": "you"}]
    assert count([{"role": "user", "content": parts}]) == count([{"role": "user", "content": "Hello\nyou"}])
    assert count([{"role": "developer", "content": "x"}]) == count([{"role": "system", "content": "x"}])
    back: dict[str, Any] = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}
    assert count([back]) == count([{"role": "assistant", "content": "x"}])
    body = {**GREEDY, "max_completion_tokens": 3, "ignore_eos": True}
    del body["max_tokens"]
    assert http.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 3


def test_what_servers_add_to_answers_can_be_sent_back(http: httpx.Client) -> None:
    def tokens(*messages: dict[str, Any]) -> list[int]:
        response = http.post("/tokenize", json={"messages": [*messages, {"role": "user", "content": "y"}]})
        assert response.status_code == 200, response.text
        ids: list[int] = response.json()["tokens"]
        return ids

    plain = tokens({"role": "assistant", "content": "x"})
    extras: dict[str, Any] = {
        "annotations": [{"type": "url_citation"}],
        "reasoning_details": [{}],
        "provider_specific_fields": None,
        "token_ids": [1],
        "prefix": False,
    }
    assert tokens({"role": "assistant", "content": "x", **extras}) == plain
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "annotations": []}
    assert tokens({"role": "assistant", "content": [part]}) == plain
    assert tokens({"role": "assistant", "content": None, "refusal": "x"}) == plain
    assert tokens({"role": "assistant"}) == tokens({"role": "assistant", "content": ""})


@pytest.mark.parametrize("content", [None, []])
def test_tools_that_have_nothing_to_say(http: httpx.Client, content: Any) -> None:
    def tokens(said: Any) -> list[int]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        result = {"role": "tool", "tool_call_id": "1", "content": said}
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}, result]
        response = http.post("/tokenize", json={"messages": messages})
        assert response.status_code == 200, response.text
        ids: list[int] = response.json()["tokens"]
        return ids

    assert tokens(content) == tokens("")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_obfuscated_chunks_have_one_size(http: httpx.Client, path: str) -> None:
    body = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"prompt": "the hen"} if path == "/v1/completions" else {"messages": HELLO}
    for asked in (None, False, True):
        text = http.post(
            path, json={**body, "stream_options": {"include_obfuscation": asked, "include_usage": True}}
        ).text
        chunks = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: {")]
        deltas = [json.loads(chunk) for chunk in chunks if json.loads(chunk)["choices"]]
        assert len(deltas) > 5 and all(("obfuscation" in delta) == bool(asked) for delta in deltas)
        if asked:
            # Bytes of what varies; each answer's id, date and so on are always as long.
            sizes = {len(chunk.encode()) for chunk in chunks[:-1]}
            assert len(sizes) == 1, sizes
            assert len({delta["obfuscation"] for delta in deltas}) > len(deltas) - 2
            assert "obfuscation" not in json.loads(chunks[-1])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_continuous_usage_counts_what_has_been_sent(http: httpx.Client, path: str) -> None:
    body = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "stream": True, "n": 2, "return_token_ids": True}
    body |= {"prompt": "the hen"} if path == "/v1/completions" else {"messages": HELLO}
    options = {"include_usage": True, "continuous_usage_stats": True}
    text = http.post(path, json={**body, "stream_options": options}).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
    sent = 0
    for chunk in chunks:
        for choice in chunk["choices"]:
            sent += len(choice.get("token_ids", []))
        assert chunk["usage"]["completion_tokens"] == sent
        assert chunk["usage"]["total_tokens"] == sent + chunk["usage"]["prompt_tokens"]
    if "messages" in body:
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks[:2]] == [0, 0], "the roles"
    assert sent == 12


def test_neutral_fields_are_accepted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        **{**GREEDY, "max_tokens": 1},
        user="me",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        modalities=["text"],
        tool_choice="auto",
        tools=[],
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 1


def test_continue_final_message(http: httpx.Client) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    text = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text.endswith("assistant\nOnce upon")


def test_request_id_header(http: httpx.Client) -> None:
    body = {**GREEDY, "max_tokens": 1}
    response = http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1" and response.json()["id"] == "chatcmpl-abc-1"
    hostile = http.post("/v1/chat/completions", json=body, headers=[(b"X-Request-Id", b"a b\xff")])
    assert len(hostile.headers["x-request-id"]) == 32
