"""Load on a server: requests sent at their times, each stream timed as it arrives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from typing import Any

from llmjax.bench.client import OpenAIClient, RequestFailed
from llmjax.bench.dataset import Sample
from llmjax.bench.metrics import RequestRecord
from llmjax.errors import ConfigError

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where requests go and what all of them have.

    Args:
        backend: "openai" (completions) or "openai-chat".
        model: name in the API.
        fields: further fields of every request.
        endpoint: path instead of the backend's own.
    """

    client: OpenAIClient
    backend: str
    model: str
    fields: Mapping[str, Any]
    endpoint: str | None = None

    @property
    def path(self) -> str:
        return self.endpoint or ENDPOINTS[self.backend]

    def payload(self, sample: Sample) -> dict[str, Any]:
        """The body of a request.

        Raises:
            ConfigError: token ids for a chat, which takes texts.
        """
        body = {
            "model": self.model,
            "max_tokens": sample.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        if self.backend == "openai":
            return {"prompt": sample.prompt, **body}
        if not isinstance(sample.prompt, str):
            raise ConfigError("--backend openai-chat takes texts: use --dataset-name custom or sharegpt with texts")
        return {"messages": [{"role": "user", "content": sample.prompt}], **body}


async def run_load(
    target: Target, samples: Sequence[Sample], arrivals: Sequence[float], *, max_concurrency: int | None
) -> list[RequestRecord]:
    """Sends every sample at its time and waits for all answers.

    Args:
        arrivals: seconds from now, one a sample, rising.
        max_concurrency: requests under way at most; later ones wait, and their time starts when they are sent.
    """
    gate: Any = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    begin = time.perf_counter()

    async def at_its_time(sample: Sample, arrival: float) -> RequestRecord:
        await asyncio.sleep(max(0.0, begin + arrival - time.perf_counter()))
        async with gate:
            return await send(target, sample)

    return await asyncio.gather(*(at_its_time(*pair) for pair in zip(samples, arrivals, strict=True)))


async def send(target: Target, sample: Sample) -> RequestRecord:
    """One request; a failure is part of the record, not raised."""
    start = time.perf_counter()
    times: list[float] = []
    texts: list[str] = []
    usage: Mapping[str, Any] | None = None
    error: str | None = None
    end = start
    try:
        async with aclosing(target.client.stream(target.path, target.payload(sample))) as events:
            async for event in events:
                usage = event.get("usage") or usage
                text = _text_of(event)
                if text is None:
                    continue
                end = time.perf_counter()
                if text:  # the opening role and the closing finish reason bring none
                    times.append(end)
                    texts.append(text)
        if usage is None:
            error = f"{target.path}: the stream has no usage: stream_options.include_usage is not supported there"
    except RequestFailed as failure:
        error = str(failure)
    return RequestRecord(
        start=start,
        end=end if error is None else time.perf_counter(),
        prompt_tokens=int((usage or {}).get("prompt_tokens", 0)),
        output_tokens=int((usage or {}).get("completion_tokens", 0)),
        chunk_times=times,
        text="".join(texts),
        error=error,
    )


def _text_of(event: Mapping[str, Any]) -> str | None:
    """The new text of an event; None: it has no choice, only usage for example."""
    if not event.get("choices"):
        return None
    choice = event["choices"][0]
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or ""
