"""Token ids in, token ids out: what is rendered is generated as if it had been asked at once."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GENERATE, SCORE = "/inference/v1/generate", "/generative_scoring"
HELLO = [{"role": "user", "content": "Hello the hén"}]
ASKED: dict[str, Any] = {
    "max_tokens": 8,
    "temperature": 0.8,
    "top_p": 0.9,
    "seed": 3,
    "stop": ["zzz"],
    "logit_bias": {"40": 2.5},
    "min_tokens": 3,
    "repetition_detection": {"max_pattern_size": 4, "min_count": 8},
    "stop_token_ids": [5],
}


def text_of(http: httpx.Client, ids: list[int]) -> str:
    text: str = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    return text


@pytest.mark.parametrize(
    "more",
    [{}, {"structured_outputs": {"regex": "[a-f]{3,6}"}}, {"logprobs": True, "top_logprobs": 2}],
    ids=["plain", "form", "logprobs"],
)
def test_a_chat_in_two_steps(http: httpx.Client, more: dict[str, Any]) -> None:
    body = {**ASKED, **more, "messages": HELLO, "return_token_offsets": True, "return_token_ids": True}
    answer = http.post(CHAT + "/render", json=body)
    rendered = answer.json()
    assert "x-ignored-fields" not in answer.headers
    at_once = http.post(CHAT, json=body)
    assert at_once.headers["x-ignored-fields"] == "return_token_offsets"
    asked = at_once.json()
    assert rendered["token_ids"] == asked["prompt_token_ids"] and rendered["features"] is None
    text = text_of(http, rendered["token_ids"])
    pieces = [text[begin:end] for begin, end in rendered["token_offsets"]]
    assert "".join(pieces) == text and len(pieces) == len(rendered["token_ids"])
    (generated,) = http.post(GENERATE, json=rendered).json()["choices"]
    (choice,) = asked["choices"]
    assert generated["token_ids"] == choice["token_ids"] and generated["finish_reason"] == choice["finish_reason"]
    assert "text" not in generated
    if "logprobs" in more:
        for entry, expected in zip(generated["logprobs"]["content"], choice["logprobs"]["content"], strict=True):
            assert entry["logprob"] == pytest.approx(expected["logprob"], abs=1e-4)
            assert entry["top_logprobs"][0] == {name: entry[name] for name in ("token_id", "logprob", "rank")}


def test_a_rendered_form_says_what_is_not_the_default(http: httpx.Client) -> None:
    form = {"json": {"properties": {"a": {}}}, "disable_additional_properties": False, "disable_any_whitespace": True}
    body = {"messages": HELLO, "structured_outputs": form}
    rendered = http.post(CHAT + "/render", json=body).json()["sampling_params"]["structured_outputs"]
    assert {**rendered, "json": json.loads(rendered["json"])} == form
    usual = http.post(CHAT + "/render", json={**body, "structured_outputs": {"json": form["json"]}}).json()
    assert list(usual["sampling_params"]["structured_outputs"]) == ["json"]


def test_completions_in_two_steps(http: httpx.Client) -> None:
    body = {**ASKED, "prompt": ["the", "and the"], "n": 2}
    rendered = http.post(TEXT + "/render", json=body).json()
    asked = http.post(TEXT, json=body).json()["choices"]
    ids = [part["request_id"] for part in rendered]
    assert len(set(ids)) == 2
    found = []
    for part in rendered:
        answer = http.post(GENERATE, json={**part, "output_mode": "text"}).json()
        assert answer["output_mode"] == "text" and answer["request_id"] == part["request_id"]
        assert answer["usage"]["prompt_tokens"] == len(part["token_ids"])
        found += [choice["text"] for choice in answer["choices"]]
    assert found == [choice["text"] for choice in asked]


def test_a_stream_of_tokens(http: httpx.Client) -> None:
    sampling = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    body = {"token_ids": [40, 41], "sampling_params": sampling, "return_token_ids": True, "output_mode": "text"}
    whole = http.post(GENERATE, json=body).json()
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", GENERATE, json=streamed) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    *chunks, end = [json.loads(line[6:]) for line in lines[:-1]]
    assert chunks[0]["prompt_token_ids"] == [40, 41] and "prompt_token_ids" not in chunks[1]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    (expected,) = whole["choices"]
    assert [token for choice in choices for token in choice["token_ids"]] == expected["token_ids"]
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    assert sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"]) == 6
    assert choices[-1]["finish_reason"] == "length" and end["choices"] == []
    assert end["usage"]["completion_tokens"] == 6


def test_without_a_limit_the_context_is_filled(http: httpx.Client) -> None:
    body = {"token_ids": [40] * 500, "sampling_params": {"ignore_eos": True}}
    assert http.post(GENERATE, json=body).json()["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"token_ids": [40] * 600}, "token_ids"),
        ({"token_ids": "text"}, "token_ids"),
        ({"sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
        ({"sampling_params": {"echo": True}}, "sampling_params.echo"),
        ({"sampling_params": {"watermarking": True}}, "sampling_params.watermarking"),
        ({"sampling_params": {"logit_bias": {"x": 1}}}, "sampling_params.logit_bias"),
        ({"sampling_params": {"structured_outputs": {"regex": "a", "after": 1}}}, "structured_outputs.after"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"output_mode": "words"}, "output_mode"),
        ({"temperature": 0}, "temperature"),
        ({"model": "other"}, "model"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_generated(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post(GENERATE, json={"token_ids": [40], **fields})
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"].endswith(param), answer.text


def test_what_a_vllm_router_writes_beside(http: httpx.Client) -> None:
    sampling = {"max_tokens": 1, "output_kind": 2, "skip_clone": True, "flat_logprobs": False, "extra_args": None}
    body = {"token_ids": [40], "sampling_params": {**sampling, "_all_stop_token_ids": []}, "features": None}
    assert http.post(GENERATE, json={**body, "token_offsets": [[0, 1]]}).status_code == 200


@pytest.mark.parametrize("field", ["use_beam_search", "record_conversation"])
def test_what_cannot_be_rendered(http: httpx.Client, field: str) -> None:
    answer = http.post(CHAT + "/render", json={"messages": HELLO, field: True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


LABELS = [60, 61, 7]


def test_scores_are_probabilities_of_the_next_token(http: httpx.Client) -> None:
    """Against log-probabilities of completions."""
    items = ["the", " and", " hen"]
    query = http.post("/tokenize", json={"prompt": "Is it"}).json()["tokens"]
    expected = []
    for item in items:
        ids = query + http.post("/tokenize", json={"prompt": item, "add_special_tokens": False}).json()["tokens"]
        body = {"token_ids": ids, "sampling_params": {"max_tokens": 1, "logprobs": 0, "logprob_token_ids": LABELS}}
        (position,) = http.post(GENERATE, json=body).json()["choices"][0]["logprobs"]["content"]
        expected.append({entry["token_id"]: math.exp(entry["logprob"]) for entry in position["top_logprobs"]})
    asked = {"query": "Is it", "items": items, "label_token_ids": LABELS}
    whole = http.post(SCORE, json={**asked, "apply_softmax": False}).json()
    assert [entry["score"] for entry in whole["data"]] == pytest.approx([p[60] for p in expected], rel=1e-3)
    among = http.post(SCORE, json=asked).json()["data"]
    shares = [p[60] / sum(p[label] for label in LABELS) for p in expected]
    assert [entry["score"] for entry in among] == pytest.approx(shares, rel=1e-3)
    assert [entry["index"] for entry in among] == [0, 1, 2] and whole["usage"]["completion_tokens"] == 3
    turned = {"query": [41], "items": [[40]], "label_token_ids": LABELS, "item_first": True}
    same = {"query": [40], "items": [[41]], "label_token_ids": LABELS}
    assert http.post(SCORE, json=turned).json()["data"] == http.post(SCORE, json=same).json()["data"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"items": []}, "items"),
        ({"items": ["x"] * 100}, "items"),
        ({"items": [[10**6]]}, "items.0"),
        ({"items": ["the " * 600]}, "items.0"),
        ({"query": 1}, "query"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": list(range(129))}, "label_token_ids"),
        ({"label_token_ids": [10**6]}, "label_token_ids"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_scored(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post(SCORE, json={"query": "x", "items": ["y"], "label_token_ids": [40], **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
