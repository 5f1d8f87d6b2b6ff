"""Beam search over HTTP: what it finds is what the engine's own search finds."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from llmjax import BeamSearchParams
from tests.serve.conftest import Running
from tests.serve.test_cancel import hang_up

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello the world"}]
SEARCH: dict[str, Any] = {"use_beam_search": True, "n": 3, "max_tokens": 8}


def found(running: Running, prompt: str, params: BeamSearchParams) -> Any:
    async def search() -> Any:
        return [output async for output in running.engine.beam_search(prompt, params, "direct")][-1]

    return running.call(search())


def test_completions(running: Running, client: openai.OpenAI) -> None:
    direct = found(running, "in the", BeamSearchParams(3, 8, length_penalty=0.5)).outputs
    extra = {"use_beam_search": True, "length_penalty": 0.5}
    answer = client.completions.create(
        model="", prompt="in the", n=3, max_tokens=8, extra_body={**extra, "return_token_ids": True}
    )
    assert [choice.text for choice in answer.choices] == [output.text for output in direct]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.token_ids for choice in answer.choices] == [output.token_ids for output in direct]  # type: ignore
    assert len({choice.text for choice in answer.choices}) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(output.token_ids) for output in direct)
    best = client.completions.create(model="", prompt="in the", n=1, max_tokens=8, extra_body={**extra, "best_of": 3})
    assert [choice.text for choice in best.choices] == [direct[0].text]
    running.wait_idle()


def test_several_prompts_and_log_probabilities(http: httpx.Client) -> None:
    body = {**SEARCH, "prompt": ["the", "in the"], "logprobs": 2, "echo": False}
    choices = http.post(TEXT, json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    for choice in choices:
        scores = choice["logprobs"]
        assert len(scores["tokens"]) == len(scores["token_logprobs"]) == len(scores["top_logprobs"]) <= 8
        assert all(1 <= len(top) <= 3 for top in scores["top_logprobs"])
    for three in (choices[:3], choices[3:]):
        sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in three if choice["finish_reason"] == "length"]
        assert sums == sorted(sums, reverse=True)
    assert http.post(TEXT, json={**body, "logprobs": None}).json()["choices"][0]["logprobs"] is None


def test_a_chat(http: httpx.Client) -> None:
    answer = http.post(CHAT, json={**SEARCH, "messages": HELLO, "logprobs": True, "top_logprobs": 2}).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) == 3
    for choice in answer["choices"]:
        content = choice["logprobs"]["content"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)
        assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    again = http.post(CHAT, json={**SEARCH, "messages": HELLO, "temperature": 0.7, "seed": 3})
    assert [choice["message"]["content"] for choice in again.json()["choices"]] == texts
    assert again.headers["x-ignored-fields"] == "temperature,seed"


def test_a_search_without_max_tokens_takes_what_it_may(http: httpx.Client) -> None:
    body = {"messages": HELLO, "use_beam_search": True, "n": 1, "ignore_eos": True}
    answer = http.post(CHAT, json=body).json()
    assert answer["usage"]["total_tokens"] == 512


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"stream": True}, "stream", "cannot be streamed"),
        ({"stop": "x"}, "stop", "cannot be combined"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "cannot be combined"),
        ({"presence_penalty": 0.5}, "presence_penalty", "cannot be combined"),
        ({"min_tokens": 2}, "min_tokens", "cannot be combined"),
        ({"response_format": {"type": "json_object"}}, "response_format", "form"),
        ({"n": 11}, "beam_width", "--max-logprobs"),
        ({"length_penalty": 50.0}, "length_penalty", "must be a number in"),
        ({"best_of": 2}, "best_of", "below n"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty", "needs use_beam_search"),
        ({"use_beam_search": "yes"}, "use_beam_search", "boolean"),
    ],
)
def test_what_a_search_cannot_have(http: httpx.Client, fields: dict[str, Any], param: str, said: str) -> None:
    for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x"})):
        answer = http.post(path, json={**SEARCH, **body, **fields})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param and said in answer.json()["error"]["message"]


def test_fields_that_change_nothing(http: httpx.Client) -> None:
    neutral = {"stop": [], "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "logit_bias": None}
    assert http.post(CHAT, json={**SEARCH, **neutral, "messages": HELLO}).status_code == 200
    plain = {"messages": HELLO, "max_tokens": 2, "use_beam_search": False, "length_penalty": 1.0}
    assert http.post(CHAT, json=plain).status_code == 200


def test_responses_have_no_search(http: httpx.Client) -> None:
    error = http.post("/v1/responses", json={"input": "x", "use_beam_search": True}).json()["error"]
    assert error["param"] == "use_beam_search"


def test_who_leaves_leaves_nothing(running: Running) -> None:
    hang_up(running, {**SEARCH, "prompt": "the", "max_tokens": 400, "ignore_eos": True}, patient=True)
    running.wait_idle()
    assert running.engine.kv_stats().used == 0
