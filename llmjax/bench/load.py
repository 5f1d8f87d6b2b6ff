"""Load on a server: requests sent at their times, each stream timed as it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from typing import Any

from llmjax.bench.backends import BACKENDS, Backend, inputs_of
from llmjax.bench.client import OpenAIClient, RequestFailed
from llmjax.bench.dataset import Sample
from llmjax.bench.metrics import RequestRecord
from llmjax.errors import ConfigError
from llmjax.progress import progress_bar


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where requests go and what all of them have.

    Args:
        backend: a name in ``BACKENDS``.
        model: name in the API.
        fields: further fields of every request.
        endpoint: path instead of the backend's own.
        id_prefix: ids of requests (``X-Request-Id``) are this and a number; None: they have none.
        adapters: names of adapters, of which each request takes the one of its number, round and round, instead of
            ``model``; empty: there are none.
    """

    client: OpenAIClient
    backend: str
    model: str
    fields: Mapping[str, Any]
    endpoint: str | None = None
    id_prefix: str | None = None
    adapters: Sequence[str] = ()

    @property
    def api(self) -> Backend:
        return BACKENDS[self.backend]

    @property
    def path(self) -> str:
        return self.endpoint or self.api.path

    def payload(self, sample: Sample, number: int = 0) -> dict[str, Any]:
        """The body of the request of that number.

        Raises:
            ConfigError: token ids for an API that takes texts.
        """
        if self.api.only_texts and not all(isinstance(text, str) for text in (sample.prompt, *sample.more)):
            raise ConfigError(f"--backend {self.backend} takes texts, not token ids")
        model = self.adapters[number % len(self.adapters)] if self.adapters else self.model
        return {"model": model, **self.api.fields(sample), **self.fields}

    def headers(self, number: int) -> dict[str, str] | None:
        return None if self.id_prefix is None else {"X-Request-Id": f"{self.id_prefix}{number}"}


async def run_load(
    target: Target,
    samples: Sequence[Sample],
    arrivals: Sequence[float],
    *,
    max_concurrency: int | None,
    progress: bool = False,
) -> list[RequestRecord]:
    """Sends every sample at its time and waits for all answers.

    Args:
        arrivals: seconds from now, one a sample, rising.
        max_concurrency: requests under way at most; later ones wait, and their time starts when they are sent.
        progress: show a bar in a terminal.
    """
    gate: Any = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    clock = asyncio.get_running_loop().time
    begin = clock()
    failed = done = 0

    async def at_its_time(number: int, sample: Sample, arrival: float) -> RequestRecord:
        nonlocal failed, done
        await asyncio.sleep(max(0.0, begin + arrival - clock()))
        due = clock()
        async with gate:
            record = await send(target, sample, number=number, due=due)
        done += 1
        failed += record.error is not None
        bar.update(task, completed=done, note=f"{failed} failed" if failed else "")
        return record

    with progress_bar("requests", shown=progress) as bar:
        task = bar.add_task("", total=len(samples), note="")
        numbered = enumerate(zip(samples, arrivals, strict=True))
        return await asyncio.gather(*(at_its_time(number, *pair) for number, pair in numbered))


async def send(target: Target, sample: Sample, *, number: int = 0, due: float | None = None) -> RequestRecord:
    """One request; a failure is part of the record, not raised.

    Args:
        number: in its id.
        due: when it should have been sent; None: now.
    """
    api, headers, payload = target.api, target.headers(number), target.payload(sample, number)
    clock = asyncio.get_running_loop().time
    start = clock()
    times: list[float] = []
    texts: list[str] = []
    usage: tuple[int, int] | None = None
    error: str | None = None
    end = start
    try:
        if not api.streams:
            usage = api.usage_of(await target.client.post(target.path, payload, headers=headers))
            end = clock()
        else:
            events = target.client.stream(target.path, payload, headers=headers, last=api.last)
            async with aclosing(events):
                async for event in events:
                    usage = api.usage_of(event) or usage
                    text = api.text_of(event)
                    if text is None:
                        continue
                    end = clock()
                    if text:  # the opening role and the closing finish reason bring none
                        times.append(end)
                        texts.append(text)
        if usage is None:
            error = f"{target.path}: the stream has no usage: stream_options.include_usage is not supported there"
    except RequestFailed as failure:
        error = str(failure)
    read, written = usage or (0, 0)
    return RequestRecord(
        start=start,
        end=end if error is None else clock(),
        prompt_tokens=int(read),
        output_tokens=int(written),
        chunk_times=times,
        text="".join(texts),
        error=error,
        queued=0.0 if due is None else start - due,
        inputs=inputs_of(sample, target.backend),
    )
