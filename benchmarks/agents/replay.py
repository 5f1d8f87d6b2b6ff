"""Sends a session's requests one after the other, and reads what the server says of each."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.agents.dialects import Request
from llmjax.bench.client import OpenAIClient, RequestFailed
from llmjax.bench.scrape import metrics_page, prompt_seconds

LAST = ("message_stop", "response.completed", "response.incomplete", "response.failed")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request and its answer.

    Args:
        prompt_tokens: all that the model has read.
        cached_tokens: how many of these the prefix cache had.
        first_seconds: from sending to the first piece of the answer.
        computed_seconds: in which the server's engine computed the prompt's new tokens, with their attention to what
            came before; None: the server does not say.
        events: all that was streamed.
    """

    prompt_tokens: int
    cached_tokens: int
    first_seconds: float
    computed_seconds: float | None
    events: list[dict[str, Any]]

    @property
    def new_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


async def replay(client: OpenAIClient, requests: Iterable[Request]) -> list[Turn]:
    """The turns of a session.

    Raises:
        RequestFailed: the server refuses one, breaks off its answer, or does not say how many tokens it has read.
    """
    return [await replay_one(client, request) for request in requests]


async def replay_one(client: OpenAIClient, request: Request, *, computed: bool = False) -> Turn:
    """One turn of it; raises what ``replay`` raises.

    Args:
        computed: whether the server is asked for the seconds in which the prompt was computed.
    """
    events: list[dict[str, Any]] = []
    before = prompt_seconds(await metrics_page(client)) if computed else None
    sent, first = time.perf_counter(), 0.0
    async for event in client.stream(request.path, request.body, headers=request.headers, last=LAST):
        if not first and _says_something(event):
            first = time.perf_counter() - sent
        events.append(event)
    first = first or time.perf_counter() - sent  # an answer without a text has ended
    counts = next((found for event in reversed(events) if (found := _counts(event)) is not None), None)
    if counts is None:
        raise RequestFailed(f"{client.url}{request.path}: the answer does not say how many tokens were read")
    after = None if before is None else prompt_seconds(await metrics_page(client))
    return Turn(
        prompt_tokens=counts[0],
        cached_tokens=counts[1],
        first_seconds=first,
        computed_seconds=None if before is None or after is None else after - before,
        events=events,
    )


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
