"""Runs the engine requests of one HTTP request: several prompts at once, canceled together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Receive

from llmjax.adapters.reference import Adaptation
from llmjax.constraints.thinking import ThinkingBudget
from llmjax.outputs import CompletionOutput, RequestMetrics, RequestOutput
from llmjax.parsing.content import ContentReading
from llmjax.sampling.params import BeamSearchParams, SamplingParams
from llmjax.serve.context import RequestRecord, engine_id
from llmjax.serve.errors import ApiError, ClientDisconnected
from llmjax.serve.interfaces import Engine
from llmjax.serve.prompts import EncodedPrompt

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything the engine needs for one HTTP request; ``params[i]`` belongs to ``prompts[i]``.

    Args:
        owner: the API key that it belongs to.
        shown: special tokens that are part of the text.
        keep: the best of each prompt's continuations that are answered; None: all.
        searches: instead of sampling, a beam search for each prompt.
        thinking: how long each answer may reason; None: for as long as it likes.
        reading: which text of an answer is content; None: all of it.
        client: the client that asks; clients take turns.
        model: what answers call the model.
        adaptation: adapters that it is computed with; None: the model's own.
    """

    id: str
    prompts: list[EncodedPrompt]
    params: list[SamplingParams]
    priority: int = 0
    cache_salt: str | None = None
    owner: str = ""
    shown: frozenset[int] = frozenset()
    keep: int | None = None
    searches: Sequence[BeamSearchParams] = ()
    thinking: ThinkingBudget | None = None
    reading: ContentReading | None = None
    client: str = ""
    model: str = ""
    adaptation: Adaptation | None = None


@dataclass(frozen=True)
class JobOutput:
    """An output of one of the job's prompts."""

    prompt: int
    output: RequestOutput


def run_job(engine: Engine, job: Job, tally: Tally) -> AsyncGenerator[JobOutput, None]:
    """Outputs in the order they come; closing the generator aborts what is still running.

    Args:
        tally: gets what is known of the prompts; tokens of outputs are the caller's to count.
    """

    def noted(prompt: int, output: RequestOutput) -> JobOutput:
        part = _checked(JobOutput(prompt, output))
        tally.add_cached(part)
        return part

    return merged([_stream(engine, job, index) for index in range(len(job.prompts))], noted)


def _stream(engine: Engine, job: Job, index: int) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of one of the job's prompts."""
    params, own = job.params[index], job.prompts[index]
    prompt: Any = {"prompt_token_ids": own.token_ids}
    if own.media is not None:
        from llmjax.engine.front.requests import Prompt  # it is there: the engine is loaded

        prompt = Prompt(None, own.token_ids, None, own.media)
    name = engine_id(job.id, job.owner)
    if job.searches:
        return engine.beam_search(
            prompt,
            job.searches[index],
            name,
            priority=job.priority,
            cache_salt=job.cache_salt,
            logprobs=params.logprobs is not None,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            shown=job.shown,
            lora_request=job.adaptation,
        )
    return engine.generate(
        prompt,
        params,
        name,
        priority=job.priority,
        cache_salt=job.cache_salt,
        shown=job.shown,
        thinking=job.thinking,
        reading=job.reading,
        client=job.client,
        lora_request=job.adaptation,
    )


async def collect(engine: Engine, job: Job, tally: Tally) -> list[RequestOutput]:
    """The final output of every prompt, in the prompts' order."""
    final: dict[int, RequestOutput] = {}
    async with aclosing(run_job(engine, job, tally)) as parts:
        async for part in parts:
            for choice in part.output.outputs:
                tally.add_tokens(choice)
            final[part.prompt] = part.output
    if job.keep is not None:
        for output in final.values():
            output.outputs = output.outputs[: job.keep] if job.searches else _best(output.outputs, job.keep)
    return [final[i] for i in range(len(job.prompts))]


def _best(choices: list[CompletionOutput], count: int) -> list[CompletionOutput]:
    """The continuations with the highest log-probability per token, best first."""

    def score(choice: CompletionOutput) -> float:
        return (choice.cumulative_logprob or 0.0) / max(len(choice.token_ids), 1)

    best = sorted(choices, key=score, reverse=True)[:count]
    for index, choice in enumerate(best):
        choice.index = index
    return best


async def merged(streams: list[AsyncGenerator[T, None]], made: Callable[[int, T], U]) -> AsyncGenerator[U, None]:
    """What is made of each output of some generators and of its generator's place, in the order they come."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for output in stream:
                yield made(0, output)
        return
    arrived: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=2 * len(streams))

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    await arrived.put((index, output))
        except Exception as error:  # handed to the consumer, which raises it
            await arrived.put(error)
        else:
            await arrived.put(None)

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            match await arrived.get():
                case None:
                    running -= 1
                case Exception() as error:
                    raise error
                case index, output:
                    yield made(index, output)
    finally:
        await _cancel(*tasks)


async def guarded(receive: Receive, work: Coroutine[Any, Any, T], *, timeout: float | None) -> T:
    """Await ``work``, but not longer than the client stays or ``timeout`` seconds.

    Raises:
        ClientDisconnected: the client went away; ``work`` has been canceled.
        ApiError: 504, the time is over; ``work`` has been canceled.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientDisconnected
        raise ApiError(f"the request took longer than {timeout:g} s", status=504, code="request_timeout")
    finally:
        await _cancel(task, gone)


async def together(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Awaits all of them at once; where one fails, the others are canceled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(*tasks)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _checked(part: JobOutput) -> JobOutput:
    """OpenAI knows no finish reason for a failure: a failed choice fails the request."""
    for choice in part.output.outputs:
        if choice.finish_reason == "abort":
            raise ApiError("the request was aborted", status=503, code="aborted", headers={"Retry-After": "1"})
        if choice.finish_reason == "error":
            raise ApiError("the engine failed on this request", status=500, code="engine_error")
    return part


def request_metrics(times: RequestMetrics | None, *, tokens: int) -> dict[str, float | None]:
    """vLLM's ``PerRequestMetrics``: milliseconds in the queue, from there to the first token, from that to the last;
    tokens by the second since the queue.

    Args:
        times: measured for the only continuation; what is None is not known and becomes null.
        tokens: how many tokens it has.
    """
    scheduled = first = last = arrival = None
    if times is not None:
        arrival, scheduled = times.arrival_time, times.first_scheduled_time
        first, last = times.first_token_time, times.last_token_time

    def between(start: float | None, end: float | None) -> float | None:
        return None if start is None or end is None else 1000 * max(end - start, 0.0)

    generation, inference = between(first, last), between(scheduled, last)
    return {
        "queue_time_ms": between(arrival, scheduled),
        "time_to_first_token_ms": between(scheduled, first),
        "generation_time_ms": generation,
        "mean_itl_ms": None if generation is None or tokens < 2 else generation / (tokens - 1),
        "tokens_per_second": 1000 * tokens / inference if inference else None,
    }


class Tally:
    """Counts a request's tokens while its outputs pass by.

    Args:
        count_completion: False when the only generated token is one that scoring a prompt needs.
        before: tallies of earlier jobs for the same request, whose tokens are its, too.
    """

    def __init__(
        self,
        job: Job,
        record: RequestRecord,
        *,
        count_completion: bool = True,
        before: Sequence[Tally] = (),
    ) -> None:
        self._record = record
        self._before = before
        self._count_completion = count_completion
        self._cached = [0] * len(job.prompts)
        self.prompt_tokens = sum(len(prompt.token_ids) for prompt in job.prompts)
        self.completion_tokens = 0
        self.reasoning_tokens: int | None = None  # None: the model writes no reasoning
        record.prompt_tokens = sum(tally.prompt_tokens for tally in self.all)
        record.completion_tokens = sum(tally.completion_tokens for tally in before)

    def add_cached(self, part: JobOutput) -> None:
        """Notes how much of the part's prompt was in the prefix cache, and when it came."""
        self._cached[part.prompt] = max(self._cached[part.prompt], part.output.num_cached_tokens)
        self._record.times = part.output.metrics

    def add_tokens(self, choice: CompletionOutput) -> None:
        """Counts what a choice brings; after this ``usage`` includes it."""
        if self._count_completion:
            self.completion_tokens += len(choice.token_ids)
        self._record.completion_tokens = sum(tally.completion_tokens for tally in self.all)

    def usage(self) -> dict[str, Any]:
        """OpenAI's ``CompletionUsage``, of the earlier jobs too."""
        return usage_of(self.all)

    @property
    def all(self) -> list[Tally]:
        """This tally, after those of earlier jobs."""
        return [*self._before, self]

    @property
    def cached_tokens(self) -> int:
        """How many tokens of the prompts came from the prefix cache."""
        return sum(self._cached)


def usage_of(tallies: Sequence[Tally]) -> dict[str, Any]:
    """OpenAI's ``CompletionUsage`` of several jobs together."""
    prompts = sum(tally.prompt_tokens for tally in tallies)
    completions = sum(tally.completion_tokens for tally in tallies)
    usage: dict[str, Any] = {
        "prompt_tokens": prompts,
        "completion_tokens": completions,
        "total_tokens": prompts + completions,
        "prompt_tokens_details": {"cached_tokens": sum(tally.cached_tokens for tally in tallies)},
    }
    if reasoned := [tally.reasoning_tokens for tally in tallies if tally.reasoning_tokens is not None]:
        usage["completion_tokens_details"] = {"reasoning_tokens": sum(reasoned)}
    return usage
