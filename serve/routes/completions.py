"""POST /v1/completions: text or token ids, one prompt or many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from llmjax.kv_transfer import KVTransfer
from llmjax.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from llmjax.sampling.params import SamplingParams
from llmjax.sampling.structured import StructuredOutputsParams
from llmjax.serve.body import parse, read_json
from llmjax.serve.context import Server, cache_salt_of, client_of, ignored_fields, record_of, server_of
from llmjax.serve.errors import ApiError
from llmjax.serve.generation import Job, JobOutput, Tally, collect, guarded, request_metrics, run_job
from llmjax.serve.logprobs import (
    LegacyLogprobs,
    TokenNames,
    num_logprobs,
    prompt_logprobs,
    prompt_offsets,
)
from llmjax.serve.other_names import other_names
from llmjax.serve.prompts import (
    Truncation,
    check_queue,
    completion_prompts,
    off_loop,
    output_budget,
    wanted_tokens,
)
from llmjax.serve.protocol.common import (
    beam_search_params,
    check_beam_search,
    check_stream,
    check_truncation,
    sampling_params,
)
from llmjax.serve.protocol.completions import CompletionRequest
from llmjax.serve.protocol.structured import demands_form, structured_outputs
from llmjax.serve.sse import EventStream, delta_event, event
from llmjax.serve.transfer import transfer_answer, transfer_of
from llmjax.tokenizer.infill import InfillTokens

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(request: Request) -> Response | ASGIApp:
    """Continuations of one or more prompts, whole or as a stream."""
    server = server_of(request)
    config = server.config
    body = parse(await read_json(request), CompletionRequest, ignored=ignored_fields(request))
    with other_names(body.llama_names):
        job = await completion_job(server, body, request)
    tally = Tally(job, record_of(request), count_completion=not body.prompt_only)
    answer = CompletionAnswer(server=server, body=body, job=job, tally=tally, created=int(time.time()))
    if body.stream:
        return EventStream(answer.events(), keep_alive=config.sse_keep_alive_interval, timeout=config.request_timeout)
    whole = await guarded(request.receive, answer.whole(), timeout=config.request_timeout)
    return Response(whole, media_type="application/json")


async def completion_job(server: Server, body: CompletionRequest, request: Request) -> Job:
    """Checks a request and makes of it what the engine needs.

    Raises:
        ApiError: a field is wrong.
        LLMJaxError: likewise.
    """
    engine = server.engine
    server.check_model(body.model)
    server.check_task("generate")
    body.check_best_of()
    body.expand_logprobs(engine.info.vocab_size)
    record_of(request).note(body)
    limits = server.request_limits
    limits.check_logprobs(body.logprobs, field="logprobs")
    limits.check_logprobs(body.prompt_logprobs, field="prompt_logprobs")
    check_beam_search(body)
    if body.use_beam_search and (body.scores_echo or body.prompt_only):
        raise ApiError("`echo` with scores of the prompt cannot be combined with use_beam_search", param="echo")
    check_stream(body)
    check_truncation(body)
    body.check_suffix()
    priority = body.priority or 0
    limits.check_priority(priority)
    check_queue(server, prompts=len(body.prompts), choices=body.continuations)
    default = engine.info.default_sampling_params.get("max_tokens", DEFAULT_MAX_TOKENS)
    asked, default = (1, None) if body.prompt_only else wanted_tokens(body.max_tokens, default)
    salt = cache_salt_of(request, body.cache_salt)
    prompts = await completion_prompts(
        server,
        body.prompts,
        add_special_tokens=body.add_special_tokens,
        echo=body.echo or bool(body.return_prompt_text),
        skip_special_tokens=body.skip_special_tokens is True,
        truncation=Truncation.of(server, body, room=asked or default or 1),
        suffix=body.suffix,
        kept_for=salt or "",
    )
    structured = await asyncio.to_thread(structured_outputs, body) if demands_form(body) else None
    if structured is not None and body.use_beam_search:
        raise ApiError(
            f"`{structured.field}` demands a form of the answer, which a beam search does not know",
            param=structured.field,
            code="unsupported_parameter",
        )
    id = f"cmpl-{body.request_id or record_of(request).id}"
    transfer = transfer_of(engine, body, id=id, prompts=len(prompts))
    fills_gap = body.suffix and not body.ignore_eos
    ends = InfillTokens.of(server.tokenizer).ends if fills_gap else frozenset[int]()
    params = [
        _params(
            server,
            body,
            max_tokens=output_budget(server, prompt, asked=asked, default=default, field="prompt"),
            structured=structured,
            kv_transfer=transfer,
            ends=ends,
        )
        for prompt in prompts
    ]
    return Job(
        id=id,
        prompts=prompts,
        params=params,
        priority=priority,
        cache_salt=salt,
        owner=record_of(request).owner,
        client=client_of(request),
        model=server.answer_name(body.model),
        adaptation=server.adaptation(body.model, body.lora),
        keep=None if body.best_of is None else body.choices,
        searches=[beam_search_params(body, max_tokens=own.max_tokens or 1, asked=asked) for own in params]
        if body.use_beam_search
        else (),
    )


def with_room(server: Server, job: Job, *, most: int | None) -> Job:
    """A completion of ``most`` tokens, or as many as fit the context."""
    params = [
        replace(own, max_tokens=output_budget(server, prompt, asked=None, default=most, field="prompt"))
        for own, prompt in zip(job.params, job.prompts, strict=True)
    ]
    return replace(job, params=params)


def _params(
    server: Server,
    body: CompletionRequest,
    *,
    max_tokens: int,
    structured: StructuredOutputsParams | None,
    kv_transfer: KVTransfer | None,
    ends: frozenset[int],
) -> SamplingParams:
    defaults = server.engine.info.default_sampling_params
    # Echoed tokens have log-probabilities too.
    changes: dict[str, Any] = {"prompt_logprobs": body.logprobs} if body.echo and body.prompt_logprobs is None else {}
    if ends:
        changes["stop_token_ids"] = {*(body.stop_token_ids or ()), *ends}
    return sampling_params(
        body,
        defaults=defaults,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        detokenize=server.engine.tokenizer is not None,
        structured_outputs=structured,
        kv_transfer=kv_transfer,
        **changes,
    )


@dataclass(frozen=True, kw_only=True)
class CompletionAnswer:
    """Turns the engine's outputs into the response, whole or in chunks."""

    server: Server
    body: CompletionRequest
    job: Job
    tally: Tally
    created: int

    @property
    def names(self) -> TokenNames:
        return TokenNames(self.server.engine.tokenizer, as_ids=bool(self.body.return_tokens_as_token_ids))

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.job.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.job.model,
            "system_fingerprint": self.server.fingerprint,
            "choices": choices,
            **self.body.tier,
        }

    async def whole(self) -> bytes:
        """OpenAI's ``Completion`` as JSON."""
        with other_names(self.body.llama_names):  # forms are read where the answer begins
            outputs = await collect(self.server.engine, self.job, self.tally)
        offsets = await self._prompt_offsets()
        written = sum(
            num_logprobs(choice.logprobs, output.prompt_logprobs) for output in outputs for choice in output.outputs
        )
        return await off_loop(lambda: orjson.dumps(self._answer(outputs, offsets)), size=4 * written)

    def _answer(self, outputs: list[RequestOutput], offsets: list[list[int]]) -> dict[str, Any]:
        choices = [
            self._choice(i, output, choice, offsets[i])
            for i, output in enumerate(outputs)
            for choice in sorted(output.outputs, key=lambda choice: choice.index)
        ]
        answer = {**self._envelope(choices), "usage": self.tally.usage()}
        if self.server.config.enable_per_request_metrics:
            answer["metrics"] = self._metrics(outputs[-1])
        return answer | transfer_answer(self.server.engine, self.job)

    def _metrics(self, output: RequestOutput) -> dict[str, float | None] | None:
        if len(self.job.prompts) * self.body.continuations > 1:
            return None  # there are times of several
        return request_metrics(output.metrics, tokens=self.tally.completion_tokens)

    def _choice(
        self, prompt_index: int, output: RequestOutput, choice: CompletionOutput, offsets: list[int]
    ) -> dict[str, Any]:
        entry = _Choice(self, prompt_index, offsets).entry(choice, output.prompt_logprobs)
        if self.body.prompt_logprobs is not None:
            entry["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, names=self.names)
        return entry

    async def events(self) -> AsyncGenerator[bytes, None]:
        """``Completion`` objects, each with the news of one choice; the choices of all prompts interleave."""
        states: dict[int, _Choice] = {}
        scores = _PromptScores(needed=self.body.scores_echo)
        offsets = await self._prompt_offsets()
        last = None
        with other_names(self.body.llama_names):
            async with aclosing(run_job(self.server.engine, self.job, self.tally)) as parts:
                async for arrived in parts:
                    last = arrived.output
                    for part in scores.admit(arrived):
                        for choice in part.output.outputs:
                            self.tally.add_tokens(choice)
                            index = part.prompt * self.body.choices + choice.index
                            echoed = None
                            if index not in states:
                                states[index] = _Choice(self, part.prompt, offsets[part.prompt])
                                echoed = scores.of(part.prompt)
                            entry = partial(states[index].entry, choice, echoed)
                            if chunk := self._delta(await off_loop(entry, size=4 * num_logprobs(echoed))):
                                yield chunk
        if self.body.include_usage:
            end = {**self._envelope([]), "usage": self.tally.usage()}
            if self.server.config.enable_per_request_metrics and last is not None:
                end["metrics"] = self._metrics(last)
            yield event(end)

    def _delta(self, entry: dict[str, Any]) -> bytes | None:
        if not (entry["text"] or entry["logprobs"] or entry["finish_reason"] or entry.get("token_ids")):
            return None  # held back: half a character, or what may become a stop string
        chunk = self._envelope([entry])
        if self.body.include_usage:
            chunk["usage"] = self.tally.usage() if self.body.continuous_usage else None
        return delta_event(chunk, obfuscate=self.body.obfuscates)

    async def _prompt_offsets(self) -> list[list[int]]:
        """Where the tokens of each prompt begin in its text; empty unless the answer shows that."""
        prompts = self.job.prompts
        if not self.body.scores_echo:
            return [[] for _ in prompts]
        tokenizer = self.server.tokenizer
        return await off_loop(
            lambda: [prompt_offsets(tokenizer, prompt.token_ids, prompt.text or "") for prompt in prompts],
            size=4 * sum(len(prompt.token_ids) for prompt in prompts),
        )


class _PromptScores:
    """The log-probabilities of echoed prompts, which come once, with a prompt's first continuation.

    The others may start earlier: they find cached pages, while the first has to compute every position.
    """

    def __init__(self, *, needed: bool) -> None:
        self._needed = needed
        self._scores: dict[int, list[TokenLogprobs | None]] = {}
        self._waiting: dict[int, list[JobOutput]] = {}

    def admit(self, part: JobOutput) -> list[JobOutput]:
        """The parts that can be shown now that ``part`` has come."""
        if part.output.prompt_logprobs is not None:
            self._scores[part.prompt] = part.output.prompt_logprobs
        if self._needed and part.prompt not in self._scores:
            self._waiting.setdefault(part.prompt, []).append(part)
            return []
        return [*self._waiting.pop(part.prompt, ()), part]

    def of(self, prompt_index: int) -> list[TokenLogprobs | None] | None:
        return self._scores.get(prompt_index)


class _Choice:
    """One choice on its way out: the prompt is echoed with its first piece, offsets run over all of it."""

    def __init__(self, answer: CompletionAnswer, prompt_index: int, prompt_offsets: list[int]) -> None:
        self._body = body = answer.body
        self._prompt = prompt = answer.job.prompts[prompt_index]
        self._prompt_offsets = prompt_offsets
        self._first_index = prompt_index * body.choices
        self._logprobs = LegacyLogprobs(answer.names, top=body.logprobs or 0, named=body.logprob_token_ids)
        self._start = len(prompt.text or "") if body.echo else 0  # of the continuation
        self._first = True

    def entry(self, choice: CompletionOutput, prompt_logprobs: Sequence[TokenLogprobs | None] | None) -> dict[str, Any]:
        """A choice of the response: everything for a final output, the news for a delta."""
        body = self._body
        text, positions = choice.text, list[TokenLogprobs | None](choice.logprobs or [])
        ids = choice.token_ids if positions else []
        if body.prompt_only:
            text, ids, positions = "", [], []
        offsets = [self._start + offset for offset in choice.text_offsets or [0] * len(ids)] if ids else []
        if self._first and body.echo:
            text = (self._prompt.text or "") + text
            if body.scores_echo:
                ids = [*self._prompt.token_ids, *ids]
                positions = [*(prompt_logprobs or ()), *positions]
                offsets = [*self._prompt_offsets, *offsets]
        entry: dict[str, Any] = {
            "index": self._first_index + choice.index,
            "text": text,
            "logprobs": self._logprobs.format(ids, positions, offsets) if body.logprobs is not None and ids else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if body.return_token_ids:
            entry["token_ids"] = [] if body.prompt_only else choice.token_ids
            if self._first:
                entry["prompt_token_ids"] = self._prompt.token_ids
        if body.return_prompt_text and self._first:
            entry["prompt_text"] = self._prompt.text
        self._first = False
        return entry


COMPLETION_ROUTES = [Route("/v1/completions", completions, methods=["POST"])]
