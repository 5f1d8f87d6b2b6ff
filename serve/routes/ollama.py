"""/api: Ollama's API."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from llmjax.errors import InvalidRequest
from llmjax.outputs import CompletionOutput
from llmjax.parsing.choice import switches_of_thinking, tools_variable
from llmjax.parsing.events import Content
from llmjax.pulled.progress import Step
from llmjax.serve.access import check_operator
from llmjax.serve.body import parse, read_json
from llmjax.serve.context import (
    RequestRecord,
    Server,
    cache_salt_of,
    client_of,
    fingerprint,
    ignored_fields,
    model_root,
    record_of,
    server_of,
    shared_of,
)
from llmjax.serve.errors import ApiError
from llmjax.serve.generation import Job, Tally, guarded, run_job
from llmjax.serve.models import Entry, models_of
from llmjax.serve.ollama.conversation import NAMES, NAMES_OF_PROMPT, bare, chat_of, completion_of, named
from llmjax.serve.ollama.lines import MEDIA_TYPE, LineWriter, counts_of, error_line, line, now, since
from llmjax.serve.other_names import other_names
from llmjax.serve.prompts import off_loop, output_budget, template_source
from llmjax.serve.protocol.chat import ChatRequest
from llmjax.serve.protocol.ollama import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaGenerating,
    OllamaNameRequest,
)
from llmjax.serve.protocol.pooling import EmbeddingRequest
from llmjax.serve.pulls import Pulls
from llmjax.serve.routes.completions import completion_job, with_room
from llmjax.serve.routes.pooling import made_vectors
from llmjax.serve.sse import EventStream
from llmjax.serve.turn import Turn, prepare
from llmjax.serve.vector_forms import to_json
from llmjax.tokenizer.infill import InfillTokens

VERSION = "0.13.0"  # of the API: clients look whether it is new enough
NEVER = "2318-01-01T00:00:00Z"  # when the model is unloaded


async def ollama_chat(request: Request) -> Response | ASGIApp:
    """The next message of a conversation, whole or as JSON lines (Ollama)."""
    body = parse(await read_json(request, any_type=True), OllamaChatRequest, ignored=ignored_fields(request))
    if not body.messages:
        return await _loaded(request, body, chat=True)
    server, record = server_of(request), record_of(request)
    with other_names(NAMES):
        turn = await _turn(request, server, chat_of(server, body, record.ignored))
    answer = _Answer(turn=turn, writer=_writer(server, body.model, chat=True), record=record)
    return await _answered(request, body, answer, names=NAMES)


async def ollama_generate(request: Request) -> Response | ASGIApp:
    """The answer to a prompt, or its continuation, whole or as JSON lines (Ollama)."""
    body = parse(await read_json(request, any_type=True), OllamaGenerateRequest, ignored=ignored_fields(request))
    if not body.prompt and not body.suffix:
        return await _loaded(request, body, chat=False)
    server, record = server_of(request), record_of(request)
    writer = _writer(server, body.model, chat=False)
    with other_names(NAMES_OF_PROMPT):
        if body.is_plain:
            completion = completion_of(server, body, record.ignored)
            most, completion.max_tokens = completion.max_tokens, None
            job = with_room(server, await completion_job(server, completion, request), most=most)
            plain = _Plain(server, job, Tally(job, record), writer, record)
            return await _answered(request, body, plain, names=NAMES_OF_PROMPT)
        turn = await _turn(request, server, chat_of(server, body, record.ignored))
        if body.context:
            turn = _after(server, turn, body, record)
    return await _answered(request, body, _Answer(turn=turn, writer=writer, record=record), names=NAMES_OF_PROMPT)


async def _turn(request: Request, server: Server, chat: ChatRequest) -> Turn:
    salt, client = cache_salt_of(request, None), client_of(request)
    record = record_of(request)
    id = f"chat-{record.id}"
    return await prepare(server, chat, record=record, cache_salt=salt, client=client, id=id, cut=True)


def _after(server: Server, turn: Turn, body: OllamaGenerateRequest, record: RequestRecord) -> Turn:
    """The turn after what an earlier answer has given as its ``context``."""
    (prompt,), (params,) = turn.job.prompts, turn.job.params
    tokens = [*(body.context or ()), *prompt.token_ids]
    size = server.engine.info.vocab_size
    if not all(0 <= token < size for token in tokens):
        raise ApiError(f"`context` must have token ids from 0 to {size - 1}", param="context", code="invalid_value")
    if prompt.media is not None:
        raise ApiError("`images` cannot be combined with context", param="images", code="unsupported_parameter")
    longer = replace(prompt, token_ids=tokens)
    most = output_budget(server, longer, asked=None, default=params.max_tokens, field="context")
    job = replace(turn.job, prompts=[longer], params=[replace(params, max_tokens=most)])
    return replace(turn, job=job, tally=Tally(job, record))


def _writer(server: Server, model: str | None, *, chat: bool) -> LineWriter:
    return LineWriter(model=server.answer_name(named(server, model)), chat=chat)


async def _loaded(request: Request, body: OllamaGenerating, *, chat: bool) -> Response:
    """The answer to a request that only wants the model to be there, or to go."""
    models = models_of(request)
    entry = models.find(bare(body.model))
    leaves = body.lets_go and await models.unload(entry.name)
    said: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    head = {"model": entry.shown_name(bare(body.model)), "created_at": now()}
    return _json({**head, **said, "done": True, "done_reason": "unload" if leaves else "load"})


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """An answer that is read as a chat's are."""

    turn: Turn
    writer: LineWriter
    record: RequestRecord
    tokens: list[int] = field(default_factory=list)

    async def objects(self) -> AsyncGenerator[dict[str, Any], None]:
        reader = self.turn.form.reader()
        async with aclosing(self.turn.outputs()) as parts:
            async for part in parts:
                said = self.turn.said(part, reader)
                self.tokens.extend(said.choice.token_ids)
                found = self.writer.write(said.events)
                if said.finish_reason is not None:
                    counts = counts_of(self.turn.tally, self.record)
                    found += self.writer.finish(reason=said.finish_reason, counts=counts)
                    if not self.writer.chat:
                        found[-1]["context"] = [*self.turn.job.prompts[0].token_ids, *self.tokens]
                for each in found:
                    yield each


@dataclass(frozen=True)
class _Plain:
    """An answer that is all text."""

    server: Server
    job: Job
    tally: Tally
    writer: LineWriter
    record: RequestRecord

    async def objects(self) -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(run_job(self.server.engine, self.job, self.tally)) as parts:
            async for part in parts:
                (choice,) = part.output.outputs
                for each in self._read(choice):
                    yield each

    def _read(self, choice: CompletionOutput) -> list[dict[str, Any]]:
        self.tally.add_tokens(choice)
        found = self.writer.write([Content(choice.text)] if choice.text else [])
        if choice.finish_reason is not None:
            found += self.writer.finish(reason=choice.finish_reason, counts=counts_of(self.tally, self.record))
        return found


async def _answered(
    request: Request, body: OllamaGenerating, answer: _Answer | _Plain, *, names: Mapping[str, str]
) -> Response | ASGIApp:
    """An answer, in which errors have Ollama's ``names`` for fields: the engine finds some only when it begins."""
    config = server_of(request).config

    async def objects() -> AsyncGenerator[dict[str, Any], None]:
        with other_names(names):
            async with aclosing(answer.objects()) as parts:
                async for part in parts:
                    yield part

    if body.streams:
        return EventStream(
            objects(),
            keep_alive=0,  # there are no comments between lines
            timeout=config.request_timeout,
            end=b"",
            failed=error_line,
            encode=line,
            media_type=MEDIA_TYPE,
        )

    async def whole() -> dict[str, Any]:
        return answer.writer.whole([each async for each in objects()])

    return _json(await guarded(request.receive, whole(), timeout=config.request_timeout))


async def ollama_embed(request: Request) -> Response:
    """A vector of each text (Ollama)."""
    server, record = server_of(request), record_of(request)
    body = parse(await read_json(request, any_type=True), OllamaEmbedRequest, ignored=ignored_fields(request))
    record.ignored += body.without_effect()
    texts = [body.input] if isinstance(body.input, str) else body.input
    kept = None if body.truncate is False else -1
    with other_names({"truncate_prompt_tokens": "truncate"}):
        made = await _vectors_of(request, body.model, texts, field="input", kept=kept, dimensions=body.dimensions)
    vectors = await off_loop(lambda: [to_json(one.outputs.data) for one in made], size=len(made) * 1024)
    counts = {"total_duration": since(record.started), "load_duration": 0, "prompt_eval_count": record.prompt_tokens}
    return _json({"model": server.answer_name(named(server, body.model)), "embeddings": vectors, **counts})


async def ollama_embeddings(request: Request) -> Response:
    """A vector of a text (Ollama's older route)."""
    body = parse(await read_json(request, any_type=True), OllamaEmbeddingsRequest, ignored=ignored_fields(request))
    record_of(request).ignored += body.without_effect()
    (made,) = await _vectors_of(request, body.model, [body.prompt], field="prompt", kept=-1, dimensions=None)
    return _json({"embedding": to_json(made.outputs.data)})


async def _vectors_of(
    request: Request, model: str | None, texts: list[str], *, field: str, kept: int | None, dimensions: int | None
) -> list[Any]:
    server = server_of(request)
    name = named(server, model)
    server.check_task("embed")
    if not texts:
        return []
    body = EmbeddingRequest.model_construct(model=name, input=texts, truncate_prompt_tokens=kept, dimensions=dimensions)
    return await made_vectors(request, server, body, texts, body.params(task="embed"), field=field)


async def ollama_tags(request: Request) -> Response:
    """The models, under each of their names (Ollama)."""
    return _json({"models": [_card(entry, name) for entry in models_of(request).entries for name in entry.listed]})


async def ollama_ps(request: Request) -> Response:
    """The models that are loaded (Ollama)."""
    running = [(entry, entry.server) for entry in models_of(request).entries if entry.server is not None]
    return _json(
        {"models": [_card(entry, name) | _running(entry, server) for entry, server in running for name in entry.listed]}
    )


def _running(entry: Entry, server: Server) -> dict[str, Any]:
    info = server.engine.info
    end = NEVER
    if entry.expires is not None:
        end = _written(datetime.now(UTC) + timedelta(seconds=entry.expires))
    size = 0 if info.platform == "cpu" else info.weight_bytes
    return {"expires_at": end, "context_length": info.max_model_len, "size_vram": size}


async def ollama_show(request: Request) -> Response:
    """What is known of a model: of one that has not been loaded yet, its name (Ollama)."""
    body = parse(await read_json(request, any_type=True), OllamaNameRequest, ignored=ignored_fields(request))
    entry = models_of(request).find(bare(body.wanted))
    card, server = _card(entry, entry.shown_name(bare(body.wanted))), entry.last
    shown = {"license": "", "modelfile": "", "parameters": "", "template": ""}
    shown |= {"modified_at": card["modified_at"], "details": card["details"]}
    if server is None:
        return _json({**shown, "model_info": {}, "capabilities": []})
    info, template = server.engine.info, ""
    if server.engine.tokenizer is not None and info.pooler is None:
        template = template_source(server, ChatRequest.model_construct(messages=[]), with_tools=False)
    family = info.architecture
    known = {
        "general.architecture": family,
        f"{family}.context_length": info.max_model_len,
        f"{family}.block_count": info.num_layers,
        f"{family}.vocab_size": info.vocab_size,
    }
    if info.pooler is not None:
        known[f"{family}.embedding_length"] = info.pooler.size
    parameters = "\n".join(f"{name} {value}" for name, value in sorted(info.default_sampling_params.items()))
    shown |= {"parameters": parameters, "template": template}
    return _json({**shown, "model_info": known, "capabilities": _capabilities(server, template)})


def _capabilities(server: Server, template: str) -> list[str]:
    """What the model can do, in Ollama's words."""
    if server.engine.info.pooler is not None:
        return ["embedding"]
    found = ["completion"]
    if tools_variable(template) is not None:
        found.append("tools")
    if switches_of_thinking(template) or server.formats.parsers(template).reasoning_marks is not None:
        found.append("thinking")
    if server.pictures is not None:
        found.append("vision")
    return [*found, *(["insert"] if _fills_gaps(server) else [])]


def _fills_gaps(server: Server) -> bool:
    try:
        InfillTokens.of(server.tokenizer)
    except (InvalidRequest, ApiError):  # no such tokens, or no tokenizer
        return False
    return True


def _card(entry: Entry, name: str) -> dict[str, Any]:
    info = None if entry.last is None else entry.last.engine.info
    gguf = entry.config.model.endswith(".gguf") if info is None else info.model_path.endswith(".gguf")
    family = "" if info is None else info.architecture
    details = {
        "parent_model": "" if entry.adapter(name) is None else entry.name,
        "format": "gguf" if gguf else "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": entry.config.quantization or "",
    }
    digest = hashlib.sha256(f"{model_root(entry.name, entry.config)} {fingerprint(entry.config)}".encode()).hexdigest()
    sizes = {"size": 0 if info is None else info.weight_bytes, "digest": digest}
    return {
        "name": name,
        "model": name,
        "modified_at": _written(datetime.fromtimestamp(entry.created, UTC)),
        **sizes,
        "details": details,
    }


def _written(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


async def ollama_version(_: Request) -> Response:
    """The version of Ollama's API that is spoken."""
    return _json({"version": VERSION})


async def ollama_pull(request: Request) -> Response | ASGIApp:
    """Fetch a model, which joins those of the server; of one that its settings name, say that it is there (Ollama)."""
    body = parse(await read_json(request, any_type=True), OllamaNameRequest, ignored=ignored_fields(request))
    name, pulls = bare(body.wanted) or "", _pulls_of(request)
    there = any(name in entry.names for entry in models_of(request).entries)
    if there and (pulls is None or not pulls.has(name)):
        steps = _told(Step("pulling manifest"), Step("success"))
    else:
        steps = _pullers(request).follow(name)
    if body.stream is False:
        return _json({"status": (await guarded(request.receive, _last(steps), timeout=None)).status})
    return EventStream(
        steps, keep_alive=0, timeout=None, end=b"", failed=error_line, encode=_progress_line, media_type=MEDIA_TYPE
    )


async def ollama_delete(request: Request) -> Response:
    """Unload a model that was pulled, and remove it and its files; one that the settings name stays (Ollama)."""
    body = parse(await read_json(request, any_type=True), OllamaNameRequest, ignored=ignored_fields(request))
    await _pullers(request).delete(bare(body.wanted) or "")
    return Response()


def _pulls_of(request: Request) -> Pulls | None:
    pulls: Pulls | None = request.app.state.pulls
    return pulls


def _pullers(request: Request) -> Pulls:
    """What fetches and removes models; raises ApiError for whoever may not, and where there is only one model."""
    check_operator(request, shared_of(request).config)
    if (pulls := _pulls_of(request)) is None:
        raise ApiError(
            "this server has one model for as long as it runs: models are pulled and deleted where they come and go, "
            "on a server that was started with several (--model more than once, or models: in its file) or with --load "
            "demand",
            status=501,
            param="model",
            code="not_implemented",
        )
    return pulls


async def _told(*steps: Step) -> AsyncGenerator[Step, None]:
    for step in steps:
        yield step


async def _last(steps: AsyncGenerator[Step, None]) -> Step:
    async with aclosing(steps):
        *_, last = [step async for step in steps]
    return last


def _progress_line(step: Step) -> bytes:
    return line({name: value for name, value in asdict(step).items() if value is not None})


def _json(answer: dict[str, Any]) -> Response:
    return Response(orjson.dumps(answer), media_type="application/json")


OLLAMA_ROUTES = [
    Route("/api/chat", ollama_chat, methods=["POST"]),
    Route("/api/generate", ollama_generate, methods=["POST"]),
    Route("/api/embed", ollama_embed, methods=["POST"]),
    Route("/api/embeddings", ollama_embeddings, methods=["POST"]),
]
OLLAMA_MODEL_ROUTES = [
    Route("/api/tags", ollama_tags, methods=["GET"]),
    Route("/api/ps", ollama_ps, methods=["GET"]),
    Route("/api/show", ollama_show, methods=["POST"]),
    Route("/api/version", ollama_version, methods=["GET"]),
    Route("/api/pull", ollama_pull, methods=["POST"]),
    Route("/api/delete", ollama_delete, methods=["DELETE"]),
]
