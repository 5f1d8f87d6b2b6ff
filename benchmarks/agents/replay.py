"""Sends a session's requests one after the other, and reads what the server says of each."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.agents.dialects import Request
from llmjax.bench.client import OpenAIClient, RequestFailed

LAST = ("message_stop", "response.completed", "response.incomplete", "response.failed")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request and its answer.

    Args:
        prompt_tokens: all that the model has read.
        cached_tokens: how many of these the prefix cache had.
        first_seconds: from sending to the first piece of the answer.
        events: all that was streamed.
    """

    prompt_tokens: int
    cached_tokens: int
    first_seconds: float
    events: list[dict[str, Any]]

    @property
    def new_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


async def replay(client: OpenAIClient, requests: Iterable[Request]) -> list[Turn]:
    """The turns of a session.

    Raises:
        RequestFailed: the server refuses one, breaks off its answer, or does not say how many tokens it has read.
    """
    return [await _turn(client, request) for request in requests]


async def _turn(client: OpenAIClient, request: Request) -> Turn:
    events: list[dict[str, Any]] = []
    sent, first = time.perf_counter(), 0.0
    async for event in client.stream(request.path, request.body, headers=request.headers, last=LAST):
        if not first and _says_something(event):
            first = time.perf_counter() - sent
        events.append(event)
    for event in reversed(events):
        if (counts := _counts(event)) is not None:
            prompt, cached = counts
            return Turn(prompt_tokens=prompt, cached_tokens=cached, first_seconds=first, events=events)
    raise RequestFailed(f"{client.url}{request.path}: the answer does not say how many tokens were read")


def _says_something(event: dict[str, Any]) -> bool:
    """Whether an event brings a piece of the answer, in any of the APIs."""
    if choices := event.get("choices"):
        delta = choices[0]["delta"]
        return any(delta.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls"))
    return str(event.get("type", "")).endswith(("_delta", ".delta"))


def _counts(event: dict[str, Any]) -> tuple[int, int] | None:
    """Tokens of the prompt, and those of them that were cached."""
    usage = (
        event.get("usage") or (event.get("response") or {}).get("usage") or (event.get("message") or {}).get("usage")
    )
    if not usage:
        return None
    if "cache_read_input_tokens" in usage:  # Anthropic counts them beside the others
        cached = usage["cache_read_input_tokens"] or 0
        return usage["input_tokens"] + (usage.get("cache_creation_input_tokens") or 0) + cached, cached
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if "input_tokens" in usage:
        return usage["input_tokens"], (usage.get("input_tokens_details") or {}).get("cached_tokens") or 0
    return None
