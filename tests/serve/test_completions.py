"""POST /v1/completions against openai's own client and types."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion

GREEDY: dict[str, Any] = {"model": "tiny-llama", "temperature": 0, "max_tokens": 10}
NO_EOS: dict[str, Any] = {"extra_body": {"ignore_eos": True}}


def post(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={**GREEDY, "ignore_eos": True, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_answer_is_a_strict_completion(http: httpx.Client) -> None:
    answer = Completion.model_validate_json(json.dumps(post(http, prompt="the hen")), strict=True)
    assert answer.choices[0].text and answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 10
    assert answer.id.startswith("cmpl-")


def test_text_and_its_token_ids_continue_alike(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": "the hen"}).json()["tokens"]
    assert post(http, prompt=ids)["choices"][0]["text"] == post(http, prompt="the hen")["choices"][0]["text"]


def test_batches_of_both_kinds(http: httpx.Client) -> None:
    prompts = ["the hen", "and on", "thee"]
    alone = [post(http, prompt=prompt)["choices"][0]["text"] for prompt in prompts]
    batch = post(http, prompt=prompts)
    assert [choice["text"] for choice in batch["choices"]] == alone
    assert [choice["index"] for choice in batch["choices"]] == [0, 1, 2]
    assert batch["usage"]["completion_tokens"] == 30
    ids = [http.post("/tokenize", json={"prompt": prompt}).json()["tokens"] for prompt in prompts]
    assert [choice["text"] for choice in post(http, prompt=ids)["choices"]] == alone
    assert batch["usage"]["prompt_tokens"] == sum(map(len, ids))


@pytest.mark.parametrize("extra", [{}, {"echo": True}, {"n": 2, "best_of": 2}, {"echo": True, "logprobs": 2}])
def test_stream_equals_whole(http: httpx.Client, extra: dict[str, Any]) -> None:
    body = {**GREEDY, "ignore_eos": True, "prompt": ["the hen", "and on"], **extra}
    whole = http.post("/v1/completions", json=body).json()
    texts = {choice["index"]: "" for choice in whole["choices"]}
    logprobs: dict[int, dict[str, list[Any]]] = {index: {} for index in texts}
    reasons = {}
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                logprobs[choice["index"]].setdefault(name, []).extend(values)
    for choice in whole["choices"]:
        assert texts[choice["index"]] == choice["text"]
        assert reasons[choice["index"]] == choice["finish_reason"] == "length"
        if "logprobs" in extra:
            piece = logprobs[choice["index"]]
            assert piece["tokens"] == choice["logprobs"]["tokens"]
            assert piece["text_offset"] == choice["logprobs"]["text_offset"]
            assert piece["token_logprobs"][1:] == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-3)


def test_echo_with_logprobs(http: httpx.Client) -> None:
    answer = post(http, prompt="the hen", echo=True, logprobs=2, max_tokens=4, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["text"].startswith("the hen")
    logprobs = choice["logprobs"]
    prompt = choice["prompt_token_ids"]
    assert len(logprobs["tokens"]) == len(prompt) + 4 == len(logprobs["token_logprobs"])
    assert logprobs["tokens"][:2] == ["<s>", "the"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1 : len(prompt)])
    assert logprobs["text_offset"][:3] == [0, 3, 6]


def test_prompt_only_scores_the_prompt(http: httpx.Client) -> None:
    answer = post(http, prompt="the hen", echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "the hen" and answer["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    scored = post(http, prompt="the hen", prompt_logprobs=0, max_tokens=1)["choices"][0]["prompt_logprobs"]
    values = [next(iter(position.values()))["logprob"] for position in scored[1:]]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(values, abs=1e-4)


def test_default_is_sixteen_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny-llama", prompt="the", temperature=0, **NO_EOS)
    assert answer.usage is not None and answer.usage.completion_tokens == 16


def test_logit_bias_and_allowed_ids(http: httpx.Client) -> None:
    ids = post(http, prompt="the", allowed_token_ids=[33, 34], return_token_ids=True)["choices"][0]["token_ids"]
    assert set(ids) <= {33, 34}
    ids = post(http, prompt="the", logit_bias={"40": 100}, return_token_ids=True)["choices"][0]["token_ids"]
    assert set(ids) == {40}


def test_truncation_keeps_the_asked_side(http: httpx.Client) -> None:
    ids = list(range(40, 80))
    left = post(http, prompt=ids, truncate_prompt_tokens=5, return_token_ids=True)
    assert left["choices"][0]["prompt_token_ids"] == ids[-5:]
    right = post(http, prompt=ids, truncate_prompt_tokens=5, truncation_side="right", return_token_ids=True)
    assert right["choices"][0]["prompt_token_ids"] == ids[:5]
    fits = post(http, prompt=ids * 20, truncate_prompt_tokens=-1, return_token_ids=True)
    assert fits["choices"][0]["prompt_token_ids"] == (ids * 20)[-502:]
