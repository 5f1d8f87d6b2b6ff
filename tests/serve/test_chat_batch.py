"""Several conversations in one request."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion

CHAT, BATCH = "/v1/chat/completions", "/v1/chat/completions/batch"
TEXTS = ["the", "and the hen", "x"]
CONVERSATIONS = [[{"role": "user", "content": text}] for text in TEXTS]
BODY: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


def test_each_conversation_gets_its_answer(http: httpx.Client) -> None:
    fields = {**BODY, "return_token_ids": True, "logprobs": True, "top_logprobs": 1}
    answer = http.post(BATCH, json={**fields, "messages": CONVERSATIONS}).json()
    assert ChatCompletion.model_validate(answer).object == "chat.completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    prompts = 0
    for choice, messages in zip(answer["choices"], CONVERSATIONS, strict=True):
        alone = http.post(CHAT, json={**fields, "messages": messages}).json()
        assert choice["message"] == alone["choices"][0]["message"]
        assert choice["token_ids"] == alone["choices"][0]["token_ids"] and len(choice["logprobs"]["content"]) == 6
        assert choice["prompt_token_ids"] == alone["prompt_token_ids"]
        prompts += alone["usage"]["prompt_tokens"]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (prompts, 18, prompts + 18)


def test_answers_have_the_form(http: httpx.Client) -> None:
    body = {**BODY, "ignore_eos": False, "structured_outputs": {"choice": ["yes", "no"]}, "messages": CONVERSATIONS}
    choices = http.post(BATCH, json=body).json()["choices"]
    assert len(choices) == 3 and {choice["message"]["content"] for choice in choices} <= {"yes", "no"}


def test_what_had_no_effect_is_named_once(http: httpx.Client) -> None:
    answer = http.post(BATCH, json={**BODY, "messages": CONVERSATIONS, "store": True})
    assert answer.headers["x-ignored-fields"] == "store"


HELLO = CONVERSATIONS[0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": HELLO}, "messages.0"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages.0"),
        ({"messages": [HELLO] * 129}, "messages"),
        ({"messages": [HELLO, [{"role": "user", "content": None}]]}, "messages.1.0.content"),
        ({"messages": [HELLO] * 100}, "messages"),  # more than the queue has room for
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"conversation_id": "mine"}, "conversation_id"),
        ({"max_tokens": 10**6}, "max_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_asked(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post(BATCH, json={**BODY, "messages": CONVERSATIONS, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
