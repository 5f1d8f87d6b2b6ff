"""POST /v1/completions against openai's own client and types."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion

from llmjax.outputs import CompletionOutput, RequestOutput
from llmjax.serve.generation import JobOutput
from llmjax.serve.logprobs import TokenNames
from llmjax.serve.routes.completions import _PromptScores

GREEDY: dict[str, Any] = {"model": "tiny-llama", "temperature": 0, "max_tokens": 10}
SPECIAL = {"<s>", "<|im_start|>", "<|im_end|>"}
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


def test_an_invocation_is_what_its_fields_say(http: httpx.Client) -> None:
    text = post(http, prompt="the hen")["choices"][0]["text"]
    asked: dict[str, Any] = {**GREEDY, "ignore_eos": True}
    assert http.post("/invocations", json={**asked, "prompt": "the hen"}).json()["choices"][0]["text"] == text
    chat = http.post("/invocations", json={**asked, "messages": [{"role": "user", "content": "hen"}], "stream": True})
    assert chat.text.startswith("data: ") and '"object":"chat.completion.chunk"' in chat.text
    both = http.post("/invocations", json={**asked, "prompt": "the hen", "messages": None})
    assert both.json()["choices"][0]["text"] == text
    refused = http.post("/invocations", json={"input": "the hen"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


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
    assert logprobs["text_offset"][:3] == [0, 0, 3], "the BOS is not in the text"
    for token, offset in zip(logprobs["tokens"][1:], logprobs["text_offset"][1:], strict=True):
        assert choice["text"].startswith(token, offset) or not token.isascii() or token in SPECIAL


@pytest.mark.parametrize("skip", [True, False, None])
def test_echo_of_ids_shows_special_tokens_unless_they_are_to_be_skipped(http: httpx.Client, skip: bool | None) -> None:
    ids = http.post("/tokenize", json={"prompt": "the<|im_end|>hen"}).json()["tokens"]
    body = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 1, "skip_special_tokens": skip}
    (choice,) = post(http, **body)["choices"]
    assert choice["text"].startswith("thehen" if skip else "<s>the<|im_end|>hen")
    assert choice["logprobs"]["text_offset"][:6] == ([0, 0, 3, 3, 5, 6] if skip else [0, 3, 6, 16, 18, 19])
    # A text shows itself, as it came.
    (choice,) = post(http, **{**body, "prompt": "the<|im_end|>hen"})["choices"]
    assert choice["text"].startswith("the<|im_end|>hen")


def test_echo_with_logprobs_when_continuations_start_in_different_steps(http: httpx.Client) -> None:
    """The last chunk of the scored prompt leaves one token of the step's 32 to the second continuation."""
    prompt = [40 + (5 * i) % 50 for i in range(127)]
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "n": 4, "max_tokens": 3, "temperature": 0}
    body["ignore_eos"] = True
    whole = http.post("/v1/completions", json=body).json()
    texts = dict.fromkeys(range(4), "")
    logprobs: dict[int, dict[str, list[Any]]] = {index: {} for index in texts}
    # Its pages are cached by now, which helps the others only: they may even be first.
    for line in http.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n"):
        if line.startswith("data: {"):
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
                for name, values in (choice["logprobs"] or {}).items():
                    logprobs[choice["index"]].setdefault(name, []).extend(values)
    for choice in whole["choices"]:
        assert texts[choice["index"]] == choice["text"]
        assert len(choice["logprobs"]["tokens"]) == 130
        for name in ("tokens", "text_offset"):
            assert logprobs[choice["index"]][name] == choice["logprobs"][name]


def test_what_comes_before_the_scores_of_an_echoed_prompt_waits_for_them() -> None:
    def part(prompt: int, index: int, scores: Any = None) -> JobOutput:
        said = CompletionOutput(index=index, text="x", token_ids=[1])
        return JobOutput(prompt, RequestOutput("r", None, [1], [said], False, prompt_logprobs=scores))

    early, other, first, late = part(0, 1), part(1, 0, [None]), part(0, 0, [None, {}]), part(0, 1)
    scores = _PromptScores(needed=True)
    assert scores.admit(early) == []
    assert scores.admit(other) == [other] and scores.of(1) == [None]
    assert scores.admit(first) == [early, first] and scores.of(0) == [None, {}]
    assert scores.admit(late) == [late]
    assert _PromptScores(needed=False).admit(early) == [early]


def test_prompts_times_choices_must_fit_the_queue(http: httpx.Client) -> None:
    for prompts, choices in ((1000, 128), (69, 1), (5, 17), (2, 68)):
        body = {"prompt": [[40, 41]] * prompts, "n": choices, "max_tokens": 1}
        response = http.post("/v1/completions", json=body)
        assert response.status_code == 400 and "--max-num-queued-reqs" in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "prompt"
    answer = http.post("/v1/completions", json={"prompt": [[40, 41]] * 5, "n": 16, "max_tokens": 1})
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 80


@pytest.mark.parametrize("include", [False, True])
def test_tokens_of_a_stop_string_are_in_all_that_is_told_of_tokens(http: httpx.Client, include: bool) -> None:
    whole = post(http, prompt="the hen", max_tokens=30, logprobs=1)["choices"][0]
    text, starts = whole["text"], whole["logprobs"]["text_offset"]
    at = next(i for i in range(4, 20) if text[:-2].find(text[i : i + 3]) == i)
    stop = text[at : at + 3]
    body = {"prompt": "the hen", "max_tokens": 30, "logprobs": 1, "stop": stop, "include_stop_str_in_output": include}
    answer = post(http, **body, return_token_ids=True)
    (choice,) = answer["choices"]
    shown = at + 3 if include else at
    assert choice["text"] == text[:shown] and choice["stop_reason"] == stop
    generated = sum(start < at + 3 for start in starts)
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert choice["logprobs"][name] == pytest.approx(whole["logprobs"][name][:generated])
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == generated
    tokens = []
    for line in http.post("/v1/completions", json={**GREEDY, "ignore_eos": True, **body, "stream": True}).text.split(
        "\n"
    ):
        if line.startswith("data: {"):
            (piece,) = json.loads(line.removeprefix("data: "))["choices"]
            tokens += (piece["logprobs"] or {"tokens": []})["tokens"]
    assert tokens == choice["logprobs"]["tokens"]


def test_prompt_only_scores_the_prompt(http: httpx.Client) -> None:
    answer = post(http, prompt="the hen", echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "the hen" and answer["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    scored = post(http, prompt="the hen", prompt_logprobs=0, max_tokens=1)["choices"][0]["prompt_logprobs"]
    values = [next(iter(position.values()))["logprob"] for position in scored[1:]]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"echo": True, "logprobs": 20}),
        ("/v1/completions", {"echo": True, "logprobs": 20, "stream": True}),
        ("/v1/completions", {"prompt_logprobs": 20}),
        ("/v1/chat/completions", {"prompt_logprobs": 20}),
    ],
)
def test_many_logprobs_are_written_beside_the_event_loop(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    text, threads = TokenNames.text, []

    def noted(self: TokenNames, token_id: int) -> str:
        threads.append(threading.current_thread().name)
        return text(self, token_id)

    monkeypatch.setattr(TokenNames, "text", noted)
    prompt = "the hen and on " * 40
    body = {"prompt": prompt} if path == "/v1/completions" else {"messages": [{"role": "user", "content": prompt}]}
    response = http.post(path, json={**GREEDY, **body, **fields, "max_tokens": 1})
    assert response.status_code == 200 and "error" not in response.text
    assert len(threads) > 4000 and all(name.startswith("asyncio_") for name in threads[:4000])


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
