"""Fields beyond OpenAI's core: each has its effect, is said to have none, or is refused with the reason."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from llmjax.serve.protocol.chat import ChatRequest
from llmjax.serve.protocol.completions import CompletionRequest
from llmjax.serve.protocol.responses import ResponsesRequest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello the world"}]
BODY: dict[str, Any] = {"messages": HELLO, "max_tokens": 6, "ignore_eos": True}

# vLLM's fields beyond OpenAI's, and candle-vLLM's.
VLLM = [
    "max_completion_tokens",
    "response_format",
    "seed",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "top_k",
    "min_p",
    "thinking_token_budget",
    "include_reasoning",
    "use_beam_search",
    "repetition_penalty",
    "length_penalty",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "echo",
    "truncation_side",
    "prompt_logprobs",
    "logprob_token_ids",
    "allowed_token_ids",
    "bad_words",
    "add_generation_prompt",
    "documents",
    "priority",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "structured_outputs",
    "request_id",
    "session_id",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "return_prompt_text",
    "cache_salt",
    "kv_transfer_params",
    "vllm_xargs",
    "repetition_detection",
    "stream_interval",
    "stream_options",
    "watermarking",
    "early_stopping",
    "ec_transfer_params",
    "routed_experts_prompt_start",
    "return_token_offsets",
    "return_mm_kwargs",
]
RESPONSES = [
    "background",
    "include",
    "max_tool_calls",
    "prompt",
    "truncation",
    "mm_processor_kwargs",
    "enable_response_messages",
    "previous_input_messages",
    "previous_response",
    "structured_outputs",
    "repetition_penalty",
    "seed",
    "stop",
    "ignore_eos",
    "vllm_xargs",
]
CANDLE = [
    "messages",
    "top_p",
    "best_of",
    "repeat_last_n",
    "logit_bias",
    "user",
    "logprobs",
    "thinking",
    "enable_thinking",
    "tool_choice",
]


def test_every_field_of_the_others_is_known() -> None:
    assert set(VLLM + CANDLE) - ChatRequest.model_fields.keys() == set()
    assert set(RESPONSES) - ResponsesRequest.model_fields.keys() == set()
    assert {"suffix", "echo", "best_of", "prompt_embeds", "logprobs"} <= CompletionRequest.model_fields.keys()


REASONS = [(CHAT, ChatRequest, name) for name in ChatRequest.reasons]
REASONS += [(TEXT, CompletionRequest, name) for name in CompletionRequest.reasons if name not in ChatRequest.reasons]

NEW = ("enable_response_messages", "previous_input_messages", "previous_response")
REASONS += [("/v1/responses", ResponsesRequest, name) for name in NEW]


@pytest.mark.parametrize(("path", "model", "field"), REASONS, ids=lambda value: str(value)[:40])
def test_what_is_refused_says_why(http: httpx.Client, path: str, model: Any, field: str) -> None:
    body = {**BODY, field: "x"} if path == CHAT else {"prompt": "x", field: "x"}
    if path == "/v1/responses":
        body = {"input": "x", "store": False, field: "x"}
    error = http.post(path, json=body).json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert error["message"] == f"`{field}` {model.reasons[field]}"
    for neutral in (None, *model.neutral_values[field]):
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        assert http.post(path, json={**body, field: neutral, limit: 1}).status_code == 200


NAMED = [60, 61, 7, 61]


def test_log_probabilities_of_named_tokens(http: httpx.Client) -> None:
    """Against those of all tokens."""
    body = {
        "prompt": [40, 41],
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
    }
    (every,) = http.post(TEXT, json={**body, "logprobs": 20}).json()["choices"]
    (choice,) = http.post(TEXT, json={**body, "logprobs": 0, "logprob_token_ids": NAMED}).json()["choices"]
    assert choice["text"] == every["text"]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(every["logprobs"]["token_logprobs"], abs=1e-5)
    biased = {**body, "max_tokens": 1, "logprobs": 0}
    for position, sampled in zip(choice["logprobs"]["top_logprobs"], choice["logprobs"]["tokens"], strict=True):
        assert set(position) == {"token_id:60", "token_id:61", "token_id:7", sampled}
    for token in (60, 7):  # forced, its own log-probability says the same
        forced = http.post(TEXT, json={**biased, "allowed_token_ids": [token]}).json()["choices"][0]["logprobs"]
        assert forced["token_logprobs"][0] == pytest.approx(
            choice["logprobs"]["top_logprobs"][0][f"token_id:{token}"], abs=1e-4
        )
    chat = {**BODY, "temperature": 0, "logprobs": True, "logprob_token_ids": NAMED, "return_tokens_as_token_ids": True}
    answer = http.post(CHAT, json={**chat, "top_logprobs": 2})
    assert answer.headers["x-ignored-fields"] == "top_logprobs"
    content = answer.json()["choices"][0]["logprobs"]["content"]
    for entry in content:
        listed = [other["token"] for other in entry["top_logprobs"]]
        assert sorted(listed) == ["token_id:60", "token_id:61", "token_id:7"]
        values = [other["logprob"] for other in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
    with http.stream("POST", CHAT, json={**chat, "stream": True}) as stream:
        chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    found = [entry for chunk in chunks if (part := chunk["choices"][0]["logprobs"]) for entry in part["content"]]
    assert [entry["token"] for entry in found] == [entry["token"] for entry in content]
    assert found[0]["top_logprobs"][0]["logprob"] == pytest.approx(content[0]["top_logprobs"][0]["logprob"], abs=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprob_token_ids": [3]},
        {"logprobs": True, "logprob_token_ids": []},
        {"logprobs": True, "logprob_token_ids": [10**6]},
        {"logprobs": True, "logprob_token_ids": [-1]},
        {"logprobs": True, "logprob_token_ids": list(range(129))},
        {"logprobs": True, "logprob_token_ids": ["x"]},
        {"logprobs": True, "logprob_token_ids": [3], "use_beam_search": True},
    ],
    ids=str,
)
def test_named_tokens_that_cannot_be(http: httpx.Client, wrong: dict[str, Any]) -> None:
    answer = http.post(CHAT, json={**BODY, **wrong})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("logprob_token_ids"), answer.text


def test_penalties_of_the_last_tokens(http: httpx.Client) -> None:
    """A window as long as the text changes nothing; without tokens to look at nothing is penalized."""
    body = {"prompt": [40, 41, 42], "max_tokens": 24, "temperature": 0, "ignore_eos": True}

    def said(**more: Any) -> str:
        return http.post(TEXT, json={**body, **more}).json()["choices"][0]["text"]

    for penalty in ({"frequency_penalty": 2.0}, {"repetition_penalty": 3.0}):
        everything = said(**penalty)
        assert said(**penalty, repeat_last_n=-1) == said(**penalty, repeat_last_n=27) == everything
        assert said(**penalty, repeat_last_n=0) == said()
        assert said(**penalty, repeat_last_n=1) != everything
    assert http.post(TEXT, json={**body, "repeat_last_n": 5000}).json()["error"]["param"] == "repeat_last_n"


def mean(choice: dict[str, Any]) -> float:
    scores = choice["logprobs"]["token_logprobs"]
    return float(sum(scores) / len(scores))


def test_best_of_gives_the_likeliest(http: httpx.Client) -> None:
    body = {"prompt": "the", "max_tokens": 6, "temperature": 1.5, "seed": 3, "ignore_eos": True, "logprobs": 0}
    all_of_them = http.post(TEXT, json={**body, "n": 4}).json()["choices"]
    ranked = sorted(all_of_them, key=mean, reverse=True)
    answer = http.post(TEXT, json={**body, "n": 2, "best_of": 4}).json()
    assert [choice["text"] for choice in answer["choices"]] == [choice["text"] for choice in ranked[:2]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 24
    del body["logprobs"]
    unscored = http.post(TEXT, json={**body, "best_of": 4}).json()["choices"]
    assert [(choice["text"], choice["logprobs"]) for choice in unscored] == [(ranked[0]["text"], None)]


def test_best_of_0_asks_for_nothing(http: httpx.Client) -> None:
    body = {"prompt": "the", "max_tokens": 3, "temperature": 0}
    answers = [http.post(TEXT, json={**body, **extra}).json() for extra in ({}, {"best_of": 0}, {"best_of": 0, "n": 2})]
    texts = [[choice["text"] for choice in answer["choices"]] for answer in answers]
    assert texts[1] == texts[0] and texts[2] == 2 * texts[0]


def test_best_of_in_a_chat(http: httpx.Client) -> None:
    body = {**BODY, "temperature": 1.5, "seed": 3, "best_of": 3}
    answer = http.post(CHAT, json=body).json()
    (choice,) = answer["choices"]
    assert choice["logprobs"] is None and answer["usage"]["completion_tokens"] == 18
    error = http.post(CHAT, json={**body, "stream": True}).json()["error"]
    assert error["param"] == "best_of" and "cannot be streamed" in error["message"]
    same = {**body, "best_of": 1, "stream": True}
    with http.stream("POST", CHAT, json=same) as stream:
        chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert all(choice["logprobs"] is None for chunk in chunks for choice in chunk["choices"])


def test_a_tier_is_echoed(http: httpx.Client) -> None:
    assert http.post(CHAT, json={**BODY, "service_tier": "flex"}).json()["service_tier"] == "default"
    assert "service_tier" not in http.post(CHAT, json=BODY).json()
    assert http.post(TEXT, json={"prompt": "x", "service_tier": "auto"}).json()["service_tier"] == "default"


def test_what_has_no_effect_is_named(http: httpx.Client) -> None:
    fields = {"store": True, "thinking": True}
    answer = http.post(CHAT, json={**BODY, **fields})
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "store,thinking"
    neutral = {"store": False, "repeat_last_n": None, "thinking": None}
    assert "x-ignored-fields" not in http.post(CHAT, json={**BODY, **neutral}).headers


@pytest.mark.parametrize(
    ("hint", "neutral"),
    [
        ({"prediction": {"type": "content", "content": "x"}}, {"prediction": None}),
        ({"verbosity": "low"}, {"verbosity": "medium"}),
        ({"prompt_cache_retention": "24h"}, {"prompt_cache_retention": "in_memory"}),
        ({"prompt_cache_options": {"ttl": "1h"}}, {"prompt_cache_options": {}}),
    ],
)
def test_hints_are_taken_and_named(http: httpx.Client, hint: dict[str, Any], neutral: dict[str, Any]) -> None:
    answer = http.post(CHAT, json={**BODY, **hint})
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == next(iter(hint))
    assert "x-ignored-fields" not in http.post(CHAT, json={**BODY, **neutral}).headers


def test_hints_of_responses_are_taken_and_named(http: httpx.Client) -> None:
    body = {"input": "x", "store": False, "max_output_tokens": 1}
    hints = {"text": {"verbosity": "low"}, "prompt_cache_retention": "24h", "context_management": [{"type": "x"}]}
    answer = http.post("/v1/responses", json={**body, **hints})
    assert answer.status_code == 200, answer.text
    named = set(answer.headers["x-ignored-fields"].split(","))
    assert named == {"text.verbosity", "prompt_cache_retention", "context_management"}
    assert answer.json()["text"]["verbosity"] == "low"


def test_who_asks_is_logged(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    fields = {"user": "u", "safety_identifier": "hash", "session_id": "s", "metadata": {"team": "blue"}}
    with caplog.at_level(logging.INFO, logger="llmjax.serve.access"):
        http.post(CHAT, json={**BODY, **fields}, headers={"X-Request-Id": "who-asks"})
        http.get("/v1/models")  # answered later: the line of the first has been written
    (line,) = [line for message in caplog.messages if (line := json.loads(message))["request_id"] == "who-asks"]
    assert (line["user"], line["session"], line["metadata"]) == ("hash", "s", {"team": "blue"})


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with http.stream("POST", path, json={**body, "stream": True}) as stream:
        assert stream.status_code == 200, stream.read()
        return [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]


def test_streams_in_larger_pieces(http: httpx.Client) -> None:
    body = {"prompt": "the", "max_tokens": 12, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    one_by_one = [chunk["choices"][0] for chunk in events(http, TEXT, body)]
    pieces = [chunk["choices"][0] for chunk in events(http, TEXT, {**body, "stream_interval": 4})]
    counts = [len(piece["token_ids"]) for piece in pieces if piece["token_ids"]]
    assert sum(counts) == 12 and len(counts) <= 4 and all(count >= 4 for count in counts[1:-1])
    assert "".join(piece["text"] for piece in pieces) == "".join(piece["text"] for piece in one_by_one)
    error = http.post(TEXT, json={**body, "stream_interval": 0}).json()["error"]
    assert error["param"] == "stream_interval"


def test_repetition_is_detected(http: httpx.Client) -> None:
    body = {"prompt": "the", "max_tokens": 40, "ignore_eos": True, "allowed_token_ids": [40], "return_token_ids": True}
    wanted = {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 3}
    (choice,) = http.post(TEXT, json={**body, "repetition_detection": wanted}).json()["choices"]
    assert choice["token_ids"] == [40] * 6
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    later = {**body, "repetition_detection": wanted, "min_tokens": 9}
    assert len(http.post(TEXT, json=later).json()["choices"][0]["token_ids"]) == 9
    last = [chunk["choices"][0] for chunk in events(http, TEXT, {**body, "repetition_detection": wanted})][-1]
    assert last["finish_reason"] == "repetition"
    for bad in ({"max_pattern_size": 3}, {"max_pattern_size": 10**6, "min_count": 2}, {"size": 3}, {"min_count": "3"}):
        error = http.post(TEXT, json={**body, "repetition_detection": bad}).json()["error"]
        assert error["param"] == "repetition_detection", bad
    off = {**body, "repetition_detection": {"max_pattern_size": 0}}
    assert http.post(TEXT, json=off).json()["choices"][0]["finish_reason"] == "length"


def test_a_prompt_is_shown(http: httpx.Client) -> None:
    chat = http.post(CHAT, json={**BODY, "return_prompt_text": True}).json()
    assert chat["prompt_text"].endswith("<|im_start|>assistant\n") and "Hello the world" in chat["prompt_text"]
    first = events(http, CHAT, {**BODY, "return_prompt_text": True})[0]
    assert first["prompt_text"] == chat["prompt_text"]
    text = {"prompt": [[264, 116], [101]], "max_tokens": 1, "return_prompt_text": True}
    shown = [choice["prompt_text"] for choice in http.post(TEXT, json=text).json()["choices"]]
    plain = [http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] for tokens in text["prompt"]]  # type: ignore
    assert shown == plain
    assert "prompt_text" not in http.post(CHAT, json=BODY).json()


def test_the_prefix_cache_is_left_alone(http: httpx.Client) -> None:
    body = {"prompt": list(range(50, 120)), "max_tokens": 1}

    def cached(**more: Any) -> int:
        found = http.post(TEXT, json={**body, **more}).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return int(found)

    cached()
    assert cached() >= 64 and cached(skip_reading_prefix_cache=True) == 0 and cached() >= 64


@pytest.mark.parametrize("stop", [{"Single": "e"}, {"Multi": ["e", "zz"]}])
def test_stops_as_candle_writes_them(http: httpx.Client, stop: Any) -> None:
    body = {**BODY, "temperature": 0, "max_tokens": 40}
    assert (
        http.post(CHAT, json={**body, "stop": stop}).json()["choices"]
        == (http.post(CHAT, json={**body, "stop": "e" if "Single" in stop else ["e", "zz"]}).json()["choices"])
    )


def test_the_chat_script_of_candle(http: httpx.Client) -> None:
    """What its examples/chat.py sends."""
    extra = dict.fromkeys(("top_k", "min_p", "frequency_penalty", "presence_penalty", "thinking", "repeat_last_n"))
    body = {"model": "", "messages": HELLO, "stream": True, "max_tokens": 4, "temperature": None, "top_p": None}
    with http.stream("POST", CHAT, json={**body, **extra, "session_id": None}) as stream:
        assert stream.status_code == 200
        assert [line for line in stream.iter_lines() if line][-1] == "data: [DONE]"


def test_the_last_message_is_echoed(http: httpx.Client) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "I see "}]
    body = {**BODY, "messages": begun, "temperature": 0, "add_generation_prompt": False}
    body |= {"continue_final_message": True, "n": 2}
    plain = [choice["message"]["content"] for choice in http.post(CHAT, json=body).json()["choices"]]
    echoed = [choice["message"]["content"] for choice in http.post(CHAT, json={**body, "echo": True}).json()["choices"]]
    assert echoed == ["I see " + text for text in plain]
    texts = {0: "", 1: ""}
    for chunk in events(http, CHAT, {**body, "echo": True}):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert list(texts.values()) == echoed
    own = {**BODY, "temperature": 0}  # there the last message is the user's
    assert http.post(CHAT, json={**own, "echo": True}).json()["choices"] == http.post(CHAT, json=own).json()["choices"]


@pytest.mark.parametrize("documents", [[{"text": "x"}], [{"text": 1}], ["x"], [{}] * 1025], ids=lambda d: str(d)[:20])
def test_documents_that_nobody_reads(http: httpx.Client, documents: Any) -> None:
    """The template here does not; of one that does see ``test_prompts``."""
    error = http.post(CHAT, json={**BODY, "documents": documents}).json()["error"]
    assert error["param"].startswith("documents")
    assert http.post(CHAT, json={**BODY, "documents": []}).status_code == 200
