"""Streams say what whole answers say, whatever was asked: texts, tokens, log-probabilities, offsets, ends, usage."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

WORDS = ["the", " hen", "and", "on ", "é", "👩", "<|im_end|>", "in"]
SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>")
STOPS = ["t", "q", "\ufffd", "a", "F", "-", "\x14", "he", "x", "ll"]  # what the tiny model tends to say
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass
class Choice:
    """One choice of an answer of either endpoint."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)  # those with log-probabilities
    offsets: list[int] = field(default_factory=list)
    end: tuple[str | None, Any] = (None, None)

    def add(self, choice: dict[str, Any]) -> None:
        """Takes a choice of a whole answer, or of a chunk."""
        assert self.end[0] is None, "something came after the end"
        said = choice.get("message") or choice.get("delta") or {}
        self.text += choice.get("text") or said.get("content") or ""
        self.token_ids += choice.get("token_ids") or []
        logprobs = choice["logprobs"] or {}
        self.tokens += logprobs.get("tokens") or [entry["token"] for entry in logprobs.get("content") or ()]
        self.offsets += logprobs.get("text_offset") or []
        self.end = (choice["finish_reason"], choice.get("stop_reason"))


def gathered(answers: Iterable[dict[str, Any]]) -> tuple[dict[int, Choice], dict[str, Any]]:
    """Choices by index, and the usage, of a whole answer or of all chunks."""
    choices: dict[int, Choice] = {}
    usage: dict[str, Any] = {}
    for answer in answers:
        assert "error" not in answer, answer
        usage = answer["usage"] or usage
        for choice in answer["choices"]:
            choices.setdefault(choice["index"], Choice()).add(choice)
    return choices, usage


def any_body(draw: random.Random, path: str) -> dict[str, Any]:
    text = "".join(draw.choice(WORDS) for _ in range(draw.randint(1, 60)))
    longest = draw.randint(1, 30)
    body: dict[str, Any] = {
        "temperature": 0,
        "return_token_ids": True,
        "max_tokens": longest,
        "min_tokens": draw.choice([0, 0, min(3, longest)]),
        "n": draw.choice([1, 1, 2, 5]),
        "ignore_eos": draw.random() < 0.5,
        "skip_special_tokens": draw.random() < 0.5,
        "include_stop_str_in_output": draw.random() < 0.3,
        "stop": draw.sample(STOPS, draw.choice([0, 1, 3])),
    }
    if path == CHAT:
        return {**body, "messages": [{"role": "user", "content": text}], "logprobs": draw.random() < 0.6}
    ids = [draw.randrange(40, 250) for _ in range(draw.randint(1, 150))]
    return {
        **body,
        "prompt": draw.choice([text, ids, [text, "the"]]),
        "logprobs": draw.choice([None, 0, 2]),
        "echo": draw.random() < 0.6,
    }


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("seed", range(4))
def test_a_stream_joined_is_the_whole_answer(http: httpx.Client, path: str, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(6):
        body = any_body(draw, path)
        whole, usage = gathered([http.post(path, json=body).json()])
        options = {"stream": True, "stream_options": {"include_usage": True}}
        events = http.post(path, json={**body, **options}).text.split("\n\n")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
        streamed, streamed_usage = gathered(chunks)
        assert streamed == whole, body
        assert streamed_usage["completion_tokens"] == usage["completion_tokens"], body
        for choice in whole.values():
            check_offsets(choice)


def check_offsets(choice: Choice) -> None:
    """Each token stands where its offset says; not so special ones, which may not show, and parts of characters."""
    assert choice.offsets == sorted(choice.offsets)
    for token, offset in zip(choice.tokens, choice.offsets, strict=len(choice.offsets) > 0):
        shown = choice.text[offset : offset + len(token)]
        if token not in SPECIAL and "\ufffd" not in token + choice.text[max(0, offset - 3) : offset + len(token)]:
            assert shown == token or (offset + len(token) > len(choice.text) and token.startswith(shown))
