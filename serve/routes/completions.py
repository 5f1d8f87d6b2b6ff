"""POST /v1/completions: text or token ids, one prompt or many."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from llmjax.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from llmjax.sampling.params import SamplingParams
from llmjax.serve.body import parse, read_json
from llmjax.serve.context import Server, cache_salt_of, record_of, server_of
from llmjax.serve.generation import Job, Part, Tally, check_priority, collect, guarded, run_job
from llmjax.serve.logprobs import LegacyLogprobs, TokenNames, prompt_logprobs
from llmjax.serve.prompts import Prompt, Truncation, completion_prompts, output_budget
from llmjax.serve.protocol.common import check_logprobs, check_no_stream, sampling_params
from llmjax.serve.protocol.completions import CompletionRequest
from llmjax.serve.sse import EventStream, event

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(request: Request) -> Response | ASGIApp:
    server = server_of(request)
    config = server.config
    body = parse(await read_json(request), CompletionRequest)
    job = await _job(server, body, request)
    tally = Tally(job, record_of(request), count_completion=not body.prompt_only)
    answer = CompletionAnswer(server=server, body=body, job=job, tally=tally, created=int(time.time()))
    if body.stream:
        return EventStream(answer.events(), keep_alive=config.sse_keep_alive_interval, timeout=config.request_timeout)
    whole = await guarded(request.receive, answer.whole(), timeout=config.request_timeout)
    return Response(orjson.dumps(whole), media_type="application/json")


async def _job(server: Server, body: CompletionRequest, request: Request) -> Job:
    engine = server.engine
    server.check_model(body.model)
    body.check()
    check_logprobs(body.logprobs, field="logprobs", limit=engine.config.max_logprobs)
    check_logprobs(body.prompt_logprobs, field="prompt_logprobs", limit=engine.config.max_logprobs)
    check_no_stream(body)
    priority = body.priority or 0
    check_priority(engine, priority)
    asked = 1 if body.prompt_only else body.max_tokens
    prompts = await completion_prompts(
        server,
        body.prompts,
        add_special_tokens=body.add_special_tokens,
        echo=body.echo,
        truncation=Truncation.of(server, body, room=asked or DEFAULT_MAX_TOKENS),
    )
    params = [_params(server, body, prompt, asked=asked) for prompt in prompts]
    return Job(
        id=f"cmpl-{body.request_id or record_of(request).id}",
        prompts=prompts,
        params=params,
        priority=priority,
        cache_salt=cache_salt_of(request, body.cache_salt),
    )


def _params(server: Server, body: CompletionRequest, prompt: Prompt, *, asked: int | None) -> SamplingParams:
    defaults = server.engine.default_sampling_params
    default = defaults.get("max_tokens", DEFAULT_MAX_TOKENS)
    # Echoed tokens have log-probabilities too.
    echoed = {"prompt_logprobs": body.logprobs} if body.echo and body.prompt_logprobs is None else {}
    return sampling_params(
        body,
        defaults=defaults,
        max_tokens=output_budget(server, prompt, asked=asked, default=default, field="prompt"),
        logprobs=body.logprobs,
        detokenize=server.engine.tokenizer is not None,
        **echoed,
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
            "model": self.server.engine.model_name,
            "system_fingerprint": self.server.fingerprint,
            "choices": choices,
        }

    async def whole(self) -> dict[str, Any]:
        """OpenAI's ``Completion``."""
        outputs = await collect(self.server.engine, self.job, self.tally)
        choices = [
            self._choice(i, output, choice)
            for i, output in enumerate(outputs)
            for choice in sorted(output.outputs, key=lambda choice: choice.index)
        ]
        return {**self._envelope(choices), "usage": self.tally.usage()}

    def _choice(self, prompt_index: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        state = _Choice(self, prompt_index)
        entry = state.entry(output, choice)
        if self.body.prompt_logprobs is not None:
            entry["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, names=self.names)
        return entry

    async def events(self) -> AsyncGenerator[bytes, None]:
        """``Completion`` objects, each with the news of one choice; the choices of all prompts interleave."""
        states: dict[int, _Choice] = {}
        async with aclosing(run_job(self.server.engine, self.job)) as parts:
            async for part in parts:
                self.tally.add(part)
                for chunk in self._deltas(part, states):
                    yield chunk
        if self.body.include_usage:
            yield event({**self._envelope([]), "usage": self.tally.usage()})

    def _deltas(self, part: Part, states: dict[int, _Choice]) -> list[bytes]:
        chunks = []
        for choice in part.output.outputs:
            index = part.prompt * self.body.choices + choice.index
            state = states.setdefault(index, _Choice(self, part.prompt))
            entry = state.entry(part.output, choice)
            if not (entry["text"] or entry["logprobs"] or entry["finish_reason"] or entry.get("token_ids")):
                continue  # held back: half a character, or what may become a stop string
            chunk = self._envelope([entry])
            if self.body.include_usage:
                chunk["usage"] = self.tally.usage() if self.body.continuous_usage else None
            chunks.append(event(chunk))
        return chunks


class _Choice:
    """One choice on its way out: the prompt is echoed with its first piece, offsets run over all of it."""

    def __init__(self, answer: CompletionAnswer, prompt_index: int) -> None:
        self._body = answer.body
        self._prompt = answer.job.prompts[prompt_index]
        self._first_index = prompt_index * answer.body.choices
        self._logprobs = LegacyLogprobs(answer.names, top=answer.body.logprobs or 0)
        self._first = True

    def entry(self, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        """A choice of the response: everything for a final output, the news for a delta."""
        body = self._body
        text, ids = choice.text, list(choice.token_ids)
        positions: list[TokenLogprobs | None] = list(choice.logprobs or [])
        if body.prompt_only:
            text, ids, positions = "", [], []
        if self._first and body.echo:
            text = (self._prompt.text or "") + text
            ids = [*self._prompt.token_ids, *ids]
            positions = [*(output.prompt_logprobs or []), *positions]
        entry: dict[str, Any] = {
            "index": self._first_index + choice.index,
            "text": text,
            "logprobs": self._logprobs.format(ids, positions) if body.logprobs is not None and ids else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if body.return_token_ids:
            entry["token_ids"] = [] if body.prompt_only else choice.token_ids
            if self._first:
                entry["prompt_token_ids"] = self._prompt.token_ids
        self._first = False
        return entry


COMPLETION_ROUTES = [Route("/v1/completions", completions, methods=["POST"])]
