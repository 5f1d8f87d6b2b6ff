"""What a request would ask of the engine, for a client or a router that asks it elsewhere: /v1/completions/render and
/v1/chat/completions/render."""

from __future__ import annotations

from dataclasses import asdict, fields
from itertools import pairwise
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmjax.sampling.params import SamplingParams
from llmjax.sampling.structured import StructuredOutputsParams
from llmjax.serve.body import parse, read_json
from llmjax.serve.context import Server, ignored_fields, server_of
from llmjax.serve.errors import ApiError
from llmjax.serve.generation import Job
from llmjax.serve.logprobs import prompt_offsets
from llmjax.serve.prompts import EncodedPrompt, off_loop
from llmjax.serve.protocol.chat import ChatRequest
from llmjax.serve.protocol.common import GenerationRequest
from llmjax.serve.protocol.completions import CompletionRequest
from llmjax.serve.protocol.generate import SAMPLING
from llmjax.serve.routes.chat import read_custom_tools, turn_of
from llmjax.serve.routes.completions import completion_job

# What is more than one request of an engine, or not the engine's.
_SEVERAL = ("use_beam_search", "best_of", "conversation_id", "record_conversation")


async def render_chat(request: Request) -> Response:
    """The tokens and the sampling parameters that a chat comes to, as /inference/v1/generate takes them."""
    server = server_of(request)
    body = parse(await read_json(request), ChatRequest, ignored=ignored_fields(request))
    with_offsets = _checked(body)
    turn = await turn_of(request, server, body, read_custom_tools(body))
    if turn.job.thinking is not None:
        raise _unsupported("thinking_token_budget")
    (rendered,) = await _rendered(server, body, turn.job, with_offsets=with_offsets)
    return Response(orjson.dumps(rendered), media_type="application/json")


async def render_completion(request: Request) -> Response:
    """The tokens and the sampling parameters that each prompt of a completion comes to."""
    server = server_of(request)
    body = parse(await read_json(request), CompletionRequest, ignored=ignored_fields(request))
    with_offsets = _checked(body)
    job = await completion_job(server, body, request)
    rendered = await _rendered(server, body, job, with_offsets=with_offsets)
    return Response(orjson.dumps(rendered), media_type="application/json")


def _checked(body: GenerationRequest) -> bool:
    """Whether offsets are asked for: only here that is not without effect."""
    for name in _SEVERAL:
        if getattr(body, name, None):
            raise _unsupported(name)
    wanted, body.return_token_offsets = bool(body.return_token_offsets), None
    return wanted


def _unsupported(name: str) -> ApiError:
    message = f"`{name}` is not supported here: it takes more than one request of the engine"
    return ApiError(message, param=name, code="unsupported_parameter")


async def _rendered(server: Server, body: GenerationRequest, job: Job, *, with_offsets: bool) -> list[dict[str, Any]]:
    several = len(job.prompts) > 1
    size = sum(len(prompt.text or "") for prompt in job.prompts) if with_offsets else 0
    offsets = await off_loop(
        lambda: [_offsets(server, prompt) if with_offsets else None for prompt in job.prompts], size=size
    )
    return [
        {
            "request_id": f"{job.id}-{number}" if several else job.id,
            "token_ids": prompt.token_ids,
            "token_offsets": offsets[number],
            "features": None,
            "sampling_params": as_json(params),
            "model": body.model,
            "stream": bool(body.stream),
            "stream_options": None if body.stream_options is None else body.stream_options.model_dump(),
            "cache_salt": body.cache_salt,
            "priority": job.priority,
            "kv_transfer_params": body.kv_transfer_params,
        }
        for number, (prompt, params) in enumerate(zip(job.prompts, job.params, strict=True))
    ]


def _offsets(server: Server, prompt: EncodedPrompt) -> list[tuple[int, int]] | None:
    """Where each token begins and ends in the prompt's text; None: it has come as tokens."""
    if prompt.text is None:
        return None
    begins = prompt_offsets(server.tokenizer, prompt.token_ids, prompt.text)
    return list(pairwise([*begins, len(prompt.text)]))


def as_json(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters under their names, but for those that change nothing."""
    given: dict[str, Any] = {"max_tokens": params.max_tokens}
    for field in fields(params):
        value = getattr(params, field.name)
        if field.name not in SAMPLING or value == field.default:
            continue
        match field.name:
            case "structured_outputs":
                given[field.name] = _form(value)
            case "repetition_detection":
                given[field.name] = asdict(value)
            case "logit_bias":
                given[field.name] = {str(token): bias for token, bias in value.items()}
            case name:
                given[name] = list(value) if isinstance(value, tuple) else value
    return given


def _form(form: StructuredOutputsParams) -> dict[str, Any]:
    given = {field: getattr(form, field.name) for field in fields(form) if field.name != "field"}
    told = {field.name: value for field, value in given.items() if value != field.default}
    if form.after is not None:
        told["after"] = asdict(form.after)
    if form.instead is not None:
        told["instead"] = _form(form.instead)
    return told


RENDER_ROUTES = [
    Route("/v1/chat/completions/render", render_chat, methods=["POST"]),
    Route("/v1/completions/render", render_completion, methods=["POST"]),
]
