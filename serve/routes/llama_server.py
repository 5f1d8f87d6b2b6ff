"""/completion, /infill, /props and others: llama-server's own API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from llmjax.sampling.params import SamplingParams
from llmjax.serve.body import parse, read_json
from llmjax.serve.context import Server, ignored_fields, record_of, server_of
from llmjax.serve.errors import retry_later
from llmjax.serve.generation import Job, Tally, collect, guarded, run_job
from llmjax.serve.llama_server.answers import AnswerWriter, settings_of
from llmjax.serve.llama_server.requests import NAMES, NAMES_OF_GAP, completion_of, filling_of
from llmjax.serve.logprobs import TokenNames, num_logprobs
from llmjax.serve.other_names import other_names
from llmjax.serve.prompts import off_loop, template_source
from llmjax.serve.protocol.chat import ChatRequest
from llmjax.serve.protocol.completions import CompletionRequest
from llmjax.serve.protocol.llama_server import (
    LlamaCompletionRequest,
    LlamaEmbeddingRequest,
    LlamaInfillRequest,
    LlamaSampling,
)
from llmjax.serve.protocol.pooling import EmbeddingRequest
from llmjax.serve.routes.chat import read_custom_tools, turn_of
from llmjax.serve.routes.completions import completion_job, with_room
from llmjax.serve.routes.pooling import made_vectors
from llmjax.serve.sse import EventStream, event
from llmjax.serve.vector_forms import to_json
from llmjax.version import __version__

if TYPE_CHECKING:
    from llmjax.tokenizer import Tokenizer


async def llama_completion(request: Request) -> Response | ASGIApp:
    """Continuations of one or more prompts, whole or as a stream (llama-server)."""
    server = server_of(request)
    body = parse(await read_json(request, any_type=True), LlamaCompletionRequest, ignored=ignored_fields(request))
    with other_names(NAMES):
        completion = await completion_of(server, body, record_of(request).ignored)
        answer = await _prepared(request, server, body, completion, names=NAMES)
    return await _answered(request, body, answer)


async def llama_infill(request: Request) -> Response | ASGIApp:
    """What belongs between two texts, whole or as a stream (llama-server)."""
    server = server_of(request)
    body = parse(await read_json(request, any_type=True), LlamaInfillRequest, ignored=ignored_fields(request))
    with other_names(NAMES_OF_GAP):
        completion = await filling_of(server, body, record_of(request).ignored)
        answer = await _prepared(request, server, body, completion, names=NAMES_OF_GAP)
    return await _answered(request, body, answer)


async def _prepared(
    request: Request, server: Server, body: LlamaSampling, completion: CompletionRequest, *, names: Mapping[str, str]
) -> _Answer:
    job = await completion_job(server, completion, request)
    wanted = body.n_predict if body.n_predict is not None else body.max_tokens
    silent, most = wanted == 0, None if wanted is None or wanted < 0 else max(1, wanted)
    job = with_room(server, job, most=most)
    tally = Tally(job, record_of(request), count_completion=not silent)
    tokens = TokenNames(server.engine.tokenizer, as_ids=False)
    writers = [
        AnswerWriter(
            index=index,
            model=job.model,
            prompt=prompt,
            params=params,
            names=tokens,
            silent=silent,
            timed=bool(body.timings_per_token),
            with_tokens=bool(body.return_tokens),
            fields=body.response_fields or None,
        )
        for index, (prompt, params) in enumerate(zip(job.prompts, job.params, strict=True))
    ]
    return _Answer(server, job, tally, writers, names)


@dataclass(frozen=True)
class _Answer:
    """What is to be generated, what writes down the answer to each prompt, and the request's names for errors."""

    server: Server
    job: Job
    tally: Tally
    writers: list[AnswerWriter]
    names: Mapping[str, str]

    async def whole(self) -> bytes:
        with other_names(self.names):
            outputs = await collect(self.server.engine, self.job, self.tally)
        written = sum(num_logprobs(choice.logprobs) for output in outputs for choice in output.outputs)

        def answer() -> bytes:
            answers = [
                writer.whole(output.outputs[0], output) for writer, output in zip(self.writers, outputs, strict=True)
            ]
            return orjson.dumps(answers if len(answers) > 1 else answers[0])

        return await off_loop(answer, size=4 * written)

    async def objects(self) -> AsyncGenerator[dict[str, Any], None]:
        with other_names(self.names):  # forms are read where the answer begins
            async with aclosing(run_job(self.server.engine, self.job, self.tally)) as parts:
                async for part in parts:
                    writer = self.writers[part.prompt]
                    for choice in part.output.outputs:
                        self.tally.add_tokens(choice)
                        if (shown := writer.part(choice, part.output)) is not None:
                            yield shown
                        if choice.finish_reason is not None:
                            yield writer.end(choice, part.output)


async def _answered(request: Request, body: LlamaSampling, answer: _Answer) -> Response | ASGIApp:
    config = answer.server.config
    if body.stream:
        return EventStream(
            answer.objects(),
            keep_alive=config.sse_keep_alive_interval,
            timeout=config.request_timeout,
            end=b"",  # the last object has ``stop``
            encode=event,
        )
    whole = await guarded(request.receive, answer.whole(), timeout=config.request_timeout)
    return Response(whole, media_type="application/json")


async def llama_embedding(request: Request) -> Response:
    """A vector of each text (llama-server)."""
    server = server_of(request)
    body = parse(await read_json(request, any_type=True), LlamaEmbeddingRequest, ignored=ignored_fields(request))
    server.check_task("embed")
    field, given = body.given
    normalize = False if body.embd_normalize == -1 else None
    wanted = EmbeddingRequest.model_construct(model=body.model, input=given, normalize=normalize)
    with other_names({"input": field}):
        inputs = wanted.inputs
    made = await made_vectors(request, server, wanted, inputs, wanted.params(task="embed"), field=field)

    def written() -> bytes:
        vectors = enumerate(to_json(one.outputs.data) for one in made)
        return orjson.dumps([{"index": index, "embedding": [vector]} for index, vector in vectors])

    return Response(await off_loop(written, size=len(made) * 1024), media_type="application/json")


async def apply_template(request: Request) -> Response:
    """The prompt that the chat template makes of a conversation (llama-server)."""
    server = server_of(request)
    body = parse(await read_json(request, any_type=True), ChatRequest, ignored=ignored_fields(request))
    turn = await turn_of(request, server, body, read_custom_tools(body))
    return _json({"prompt": turn.job.prompts[0].text})


async def props(request: Request) -> Response:
    """The model, its chat template, and how answers are sampled unless a request says otherwise (llama-server)."""
    server = server_of(request)
    engine, tokenizer = server.engine, server.engine.tokenizer
    defaults = SamplingParams(**{"max_tokens": None, **engine.info.default_sampling_params})
    template = ""
    if tokenizer is not None and tokenizer.chat_template is not None:
        template = template_source(server, ChatRequest.model_construct(messages=[]), with_tools=False)
    return _json(
        {
            "default_generation_settings": {
                **_slot(server, 0, busy=False),
                "params": settings_of(defaults, stream=True),
            },
            "total_slots": engine.info.max_num_seqs,
            "model_alias": engine.info.model_name,
            "model_path": server.model_root,
            "modalities": {"vision": server.pictures is not None, "audio": False},
            "chat_template": template,
            "bos_token": "" if tokenizer is None else _token(tokenizer, tokenizer.bos_token_id),
            "eos_token": "" if tokenizer is None else _token(tokenizer, tokenizer.eos_token_id),
            "build_info": f"llmjax-{__version__}",
            "is_sleeping": engine.is_sleeping,
        }
    )


def _token(tokenizer: Tokenizer, id: int | None) -> str:
    return "" if id is None else tokenizer.id_to_token(id)


async def slots(request: Request) -> Response:
    """How many requests can be answered at once, and are (llama-server)."""
    server = server_of(request)
    running, places = server.engine.num_requests, server.engine.info.max_num_seqs
    if request.query_params.get("fail_on_no_slot") and running >= places:
        raise retry_later(f"all {places} slots are taken", seconds=1, code="queue_full")
    return _json([_slot(server, place, busy=place < running) for place in range(places)])


def _slot(server: Server, place: int, *, busy: bool) -> dict[str, Any]:
    info = server.engine.info
    return {"id": place, "n_ctx": info.max_model_len, "speculative": info.drafts > 0, "is_processing": busy}


def _json(answer: Any) -> Response:
    return Response(orjson.dumps(answer), media_type="application/json")


LLAMA_SERVER_ROUTES = [
    Route("/completion", llama_completion, methods=["POST"]),
    Route("/completions", llama_completion, methods=["POST"], name="llama_completions"),
    Route("/infill", llama_infill, methods=["POST"]),
    Route("/embedding", llama_embedding, methods=["POST"]),
    Route("/embeddings", llama_embedding, methods=["POST"], name="llama_embeddings"),
]
LLAMA_SERVER_MODEL_ROUTES = [
    Route("/apply-template", apply_template, methods=["POST"]),
    Route("/props", props, methods=["GET"]),
    Route("/slots", slots, methods=["GET"]),
]
