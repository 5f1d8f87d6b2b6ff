"""POST /inference/v1/generate: token ids in, token ids out, for clients and routers that render prompts themselves."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from llmjax.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from llmjax.serve.body import parse, read_json
from llmjax.serve.context import Server, ignored_fields, record_of, server_of
from llmjax.serve.generation import Job, Tally, collect, guarded, request_metrics, run_job
from llmjax.serve.logprobs import FLOOR, TokenNames, chat_logprobs, num_logprobs, prompt_logprobs
from llmjax.serve.other_names import other_names
from llmjax.serve.prompts import off_loop
from llmjax.serve.protocol.completions import CompletionRequest
from llmjax.serve.protocol.generate import NAMES, GenerateRequest
from llmjax.serve.routes.completions import completion_job
from llmjax.serve.sse import EventStream, event
from llmjax.serve.transfer import transfer_answer


async def generate(request: Request) -> Response | ASGIApp:
    """Continuations of token ids, as token ids, and as text where output_mode says so."""
    server = server_of(request)
    config = server.config
    body = parse(await read_json(request), GenerateRequest, ignored=ignored_fields(request))
    if body.output_mode == "text":
        _ = server.tokenizer  # raises where there is none
    with other_names(NAMES):
        room = max(server.engine.info.max_model_len - len(body.token_ids), 1)
        completion = parse(body.completion(max_tokens=room), CompletionRequest)
        job = await completion_job(server, completion, request)
    tally = Tally(job, record_of(request))
    id = body.request_id or record_of(request).id
    answer = GenerateAnswer(server=server, body=body, completion=completion, job=job, tally=tally, id=id)
    if body.stream:
        return EventStream(answer.events(), keep_alive=config.sse_keep_alive_interval, timeout=config.request_timeout)
    whole = await guarded(request.receive, answer.whole(), timeout=config.request_timeout)
    return Response(whole, media_type="application/json")


@dataclass(frozen=True, kw_only=True)
class GenerateAnswer:
    """Turns the engine's outputs into the response, whole or in chunks."""

    server: Server
    body: GenerateRequest
    completion: CompletionRequest
    job: Job
    tally: Tally
    id: str

    async def whole(self) -> bytes:
        """vLLM's ``GenerateResponse`` as JSON."""
        (output,) = await collect(self.server.engine, self.job, self.tally)
        written = num_logprobs(output.prompt_logprobs, *(choice.logprobs for choice in output.outputs))
        return await off_loop(lambda: orjson.dumps(self._answer(output)), size=4 * written)

    def _answer(self, output: RequestOutput) -> dict[str, Any]:
        choices = [self._choice(choice) for choice in sorted(output.outputs, key=lambda choice: choice.index)]
        answer = {
            **self._envelope(choices),
            "model": self.job.model,
            "created": int(time.time()),
            "usage": self.tally.usage(),
        }
        if self.completion.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, names=self._names)
        if self.server.config.enable_per_request_metrics:
            answer["metrics"] = self._metrics(output)
        return answer | self._prompt() | transfer_answer(self.server.engine, self.job)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """vLLM's ``GenerateStreamResponse``s, each with the news of a choice, then the usage."""
        first, last, told = self._prompt(), None, self.completion
        async with aclosing(run_job(self.server.engine, self.job, self.tally)) as parts:
            async for part in parts:
                last = part.output
                for choice in last.outputs:
                    self.tally.add_tokens(choice)
                    chunk = {**self._envelope([self._choice(choice)]), **first}
                    if told.continuous_usage:
                        chunk["usage"] = self.tally.usage()
                    first = {}
                    yield event(chunk)
        if told.include_usage:
            end = {**self._envelope([]), "usage": self.tally.usage()}
            if self.server.config.enable_per_request_metrics and last is not None:
                end["metrics"] = self._metrics(last)
            yield event(end)

    @property
    def _names(self) -> TokenNames:
        return TokenNames(self.server.engine.tokenizer, as_ids=False)

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"request_id": self.id, "output_mode": self.body.output_mode, "choices": choices}

    def _prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.body.token_ids} if self.body.return_token_ids else {}

    def _metrics(self, output: RequestOutput) -> dict[str, float | None] | None:
        if self.completion.continuations > 1:
            return None  # there are times of several
        return request_metrics(output.metrics, tokens=self.tally.completion_tokens)

    def _choice(self, choice: CompletionOutput) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "index": choice.index,
            "token_ids": choice.token_ids,
            "finish_reason": choice.finish_reason,
            "logprobs": None,
        }
        with_text, scores = self.body.output_mode == "text", choice.logprobs
        if with_text:
            entry["text"] = choice.text
        if scores is not None and with_text:
            top, named = self.completion.logprobs or 0, self.completion.logprob_token_ids
            entry["logprobs"] = chat_logprobs(choice.token_ids, scores, names=self._names, top=top, named=named)
        elif scores is not None:
            entry["logprobs"] = {"content": _content(choice.token_ids, scores)}
        return entry


def _content(token_ids: Sequence[int], positions: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """The log-probability of each token; those that might have stood in its place, it first and the others by rank."""
    content = []
    for token, position in zip(token_ids, positions, strict=False):  # the tokens of a stop string have none
        others = sorted((other for other in position if other != token), key=lambda other: -position[other].logprob)
        top = [_entry(other, position[other]) for other in (token, *others)]
        content.append({**_entry(token, position[token]), "top_logprobs": top})
    return content


def _entry(token: int, scored: Logprob) -> dict[str, Any]:
    return {"token_id": token, "logprob": max(scored.logprob, FLOOR), "rank": scored.rank}


GENERATE_ROUTES = [Route("/inference/v1/generate", generate, methods=["POST"])]
