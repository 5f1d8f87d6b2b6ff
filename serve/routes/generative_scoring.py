"""POST /generative_scoring: how likely a token is to follow a question and each of several items."""

from __future__ import annotations

import math
import time
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmjax.outputs import RequestOutput
from llmjax.sampling.params import SamplingParams
from llmjax.serve.body import parse, read_json
from llmjax.serve.context import Server, cache_salt_of, ignored_fields, record_of, server_of
from llmjax.serve.errors import ApiError
from llmjax.serve.generation import Job, Tally, collect, guarded
from llmjax.serve.prompts import EncodedPrompt, check_queue, off_loop, output_budget
from llmjax.serve.protocol.generate import GenerativeScoringRequest


async def generative_scoring(request: Request) -> Response:
    """The probability that the first of some tokens follows a question with each item, among them or among all."""
    server = server_of(request)
    body = parse(await read_json(request), GenerativeScoringRequest, ignored=ignored_fields(request))
    server.check_model(body.model)
    server.check_task("generate")
    limits = server.request_limits
    limits.check_priority(body.priority)
    if not body.items:
        raise ApiError("`items` is empty", param="items", code="invalid_value")
    check_queue(server, prompts=len(body.items), choices=1, field="items")
    limits.check_ids(body.label_token_ids, field="label_token_ids")
    prompts = await _prompts(server, body)
    params = SamplingParams(max_tokens=1, logprobs=0, logprob_token_ids=body.label_token_ids, detokenize=False)
    id = f"generative-scoring-{body.request_id or record_of(request).id}"
    job = Job(
        id=id,
        prompts=prompts,
        params=[params] * len(prompts),
        priority=body.priority or 0,
        cache_salt=cache_salt_of(request, body.cache_salt),
        owner=record_of(request).owner,
        model=server.answer_name(body.model),
        adaptation=server.adaptation(body.model),
    )
    tally = Tally(job, record_of(request))
    work = collect(server.engine, job, tally)
    outputs = await guarded(request.receive, work, timeout=server.config.request_timeout)
    whole = {
        "id": id,
        "object": "list",
        "created": int(time.time()),
        "model": job.model,
        "data": [{"index": i, "object": "score", "score": _score(body, output)} for i, output in enumerate(outputs)],
        "usage": tally.usage(),
    }
    return Response(orjson.dumps(whole), media_type="application/json")


async def _prompts(server: Server, body: GenerativeScoringRequest) -> list[EncodedPrompt]:
    """The question with each item.

    Raises:
        ApiError: one is empty or too long, or there is a text and no tokenizer.
    """
    if not isinstance(body.query, str):
        server.request_limits.check_ids(body.query, field="query")
    parts: list[Any] = [*body.items]
    for i, item in enumerate(parts):
        if not isinstance(item, str):
            server.request_limits.check_ids(item, field=f"items.{i}")

    def ids(one: str | list[int], field: str, *, special: bool) -> list[int]:
        if not isinstance(one, str):
            return one
        server.tokenizer.check_length(one, max_tokens=server.engine.info.max_model_len, field=field)
        return server.tokenizer.encode(one, add_special_tokens=special)

    def encoded() -> list[EncodedPrompt]:
        query = ids(body.query, "query", special=body.add_special_tokens)
        items = [ids(item, f"items.{i}", special=False) for i, item in enumerate(parts)]
        return [EncodedPrompt(item + query if body.item_first else query + item) for item in items]

    prompts = await off_loop(encoded, size=len(body.query) + sum(map(len, body.items)))
    for i, prompt in enumerate(prompts):
        output_budget(server, prompt, asked=1, default=None, field=f"items.{i}")
    return prompts


def _score(body: GenerativeScoringRequest, output: RequestOutput) -> float:
    """A softmax over the log-probabilities of the labels alone is what the logits of them alone would give."""
    (choice,) = output.outputs
    assert choice.logprobs is not None
    (position,) = choice.logprobs
    scores = [position[token].logprob for token in body.label_token_ids]
    if not body.apply_softmax:
        return math.exp(scores[0])
    most = max(scores)
    return math.exp(scores[0] - most) / sum(math.exp(score - most) for score in scores)


GENERATIVE_SCORING_ROUTES = [Route("/generative_scoring", generative_scoring, methods=["POST"])]
