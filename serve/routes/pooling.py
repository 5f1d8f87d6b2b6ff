"""POST /v1/embeddings, /rerank, /score, /classify and /pooling: what is made of texts by models that do not
generate."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmjax.engine.front.pairs import Page, Side, TextPair
from llmjax.engine.front.requests import Prompt
from llmjax.engine.front.scores import Compared, pair_inputs, score_task, scored
from llmjax.engine.front.vectors import PooledTokens
from llmjax.engine.info import PoolerInfo
from llmjax.errors import InvalidRequest
from llmjax.outputs import PoolingRequestOutput
from llmjax.pooling_params import PoolingParams
from llmjax.serve.body import parse, read_json
from llmjax.serve.context import Server, cache_salt_of, engine_id, ignored_fields, owner_of, record_of, server_of
from llmjax.serve.errors import ApiError
from llmjax.serve.generation import guarded
from llmjax.serve.other_names import other_names
from llmjax.serve.prompts import (
    TRUNCATED_PICTURES,
    Truncation,
    chat_prompt,
    off_loop,
    page_or_text,
    read_tools,
    template_source,
    text_beside,
    unread_variables,
)
from llmjax.serve.protocol.chat import MAX_CONVERSATIONS, ChatMessage, ChatTemplateFields
from llmjax.serve.protocol.common import ApiModel
from llmjax.serve.protocol.pictures import Attachment
from llmjax.serve.protocol.pooling import (
    ClassifyChatRequest,
    ClassifyRequest,
    CohereEmbedRequest,
    ConversationBody,
    EmbeddingChatRequest,
    EmbeddingRequest,
    EmbeddingType,
    InputBody,
    PageContent,
    PairsBody,
    PooledBody,
    PoolingChatRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TextsBody,
    VectorFields,
)
from llmjax.serve.vector_forms import VectorForm, to_json

CHARS_PER_TEXT = 64  # the work that an input, or an entry of an answer, is beside what is in it
CHARS_PER_NUMBER = 0.25  # what it takes to write one
CHARS_PER_ID = 0.1
SLICE_CHARS = 2**16  # tokenized before the next look whether anyone still waits
MOST_NUMBERS = 2**23  # of all vectors in one answer: some 100 MB of text
MOST_COMPARED = 2**25  # of all vectors of tokens that one request compares: 128 MiB
MOST_DESCRIBED = 512  # vectors in a header: Python's http.client, for one, reads 64 KiB of a line

Input = str | list[int] | TextPair | Side | Prompt
Texts = TypeVar("Texts", bound=ApiModel)
Chats = TypeVar("Chats", bound=ApiModel)


async def embeddings(request: Request) -> Response:
    """A vector of each text."""
    server = server_of(request)
    body = await _read(request, EmbeddingRequest, EmbeddingChatRequest)
    server.check_task("embed")
    return await _vectors(
        request, server, body, body.params(task="embed"), name="embd", kind="embedding", key="embedding"
    )


# What Cohere calls a text, and the names of prompts for it.
INPUT_TYPES: Mapping[str, Sequence[str]] = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
}


async def cohere_embed(request: Request) -> Response:
    """A vector of each text, as Cohere's embed has it."""
    server = server_of(request)
    asked = parse(await read_json(request), CohereEmbedRequest, ignored=ignored_fields(request))
    server.check_task("embed")
    field, texts = asked.given
    body, pooler = asked.body(), _pooler(server)
    names = INPUT_TYPES.get(asked.input_type or "", (asked.input_type,))
    prompt_name = next((name for name in names if name in pooler.prompts), None)
    if asked.input_type is not None and prompt_name is None:
        record_of(request).ignored.append("input_type")
    size = min(asked.output_dimension or pooler.size, pooler.size)
    if size % 8 and {"binary", "ubinary"} & set(asked.types):
        message = f"a vector of {size} numbers cannot be packed into bytes; output_dimension must be a multiple of 8"
        raise ApiError(message, param="embedding_types", code="invalid_value")
    with other_names({"dimensions": "output_dimension"}):
        params = body.params(task="embed", dimensions=asked.output_dimension, prompt_name=prompt_name)
        made = await made_vectors(request, server, body, texts, params, field=field)

    def written() -> bytes:
        vectors = [output.outputs.data for output in made]
        whole = {
            "id": f"embd-{uuid.uuid4().hex}",
            "embeddings": {kind: [_of_type(vector, kind) for vector in vectors] for kind in asked.types},
            "texts": texts,
            "meta": {"api_version": {"version": "2"}, "tokens": {"input_tokens": _usage(made)["prompt_tokens"]}},
            "response_type": "embeddings_by_type",
        }
        return orjson.dumps(whole)

    size = _size(made) * len(asked.types) + sum(map(len, texts))
    return Response(await off_loop(written, size=size), media_type="application/json")


def _of_type(vector: npt.NDArray[np.float32], kind: EmbeddingType) -> Any:
    """A vector as Cohere has it; as bits, of which each says whether a number is not below 0, the first one highest."""
    match kind:
        case "float":
            return to_json(vector)
        case "base64":
            return VectorForm().to_base64(vector)
        case "ubinary":
            return np.packbits(vector >= 0).tolist()
        case "binary":
            return (np.packbits(vector >= 0).astype(np.int16) - 128).tolist()


async def pooling(request: Request) -> Response:
    """What the model makes of each text, or of each of its tokens."""
    server = server_of(request)
    body = await _read(request, PoolingRequest, PoolingChatRequest)
    server.check_task("pooling")
    return await _vectors(request, server, body, body.params(), name="pool", kind="pooling", key="data")


async def classify(request: Request) -> Response:
    """The label of each text, and how likely each one is."""
    server = server_of(request)
    body = await _read(request, ClassifyRequest, ClassifyChatRequest)
    server.check_task("classify")
    inputs, field = await _inputs(request, server, body)
    made = await made_vectors(request, server, body, inputs, body.params(task="classify"), field=field)
    labels = _pooler(server).labels

    def data() -> list[dict[str, Any]]:
        return [
            {
                "index": index,
                "label": labels[int(output.outputs.data.argmax())],
                "probs": to_json(output.outputs.data),
                "num_classes": len(labels),
            }
            for index, output in enumerate(made)
        ]

    return await _answer(server, body.model, "classify", {"data": await off_loop(data, size=_size(made))}, made)


async def score(request: Request) -> Response:
    """How well texts fit, pair by pair."""
    server = server_of(request)
    body = parse(await read_json(request), ScoreRequest, ignored=ignored_fields(request))
    server.check_task("score")
    first, second = body.sides
    contents = [await _contents(request, server, body, getattr(body, name), name) for name in (first, second)]
    with other_names({"text_1": first, "text_2": second}):
        scores, made = await _scores(request, server, body, body.pairs_of(*contents), field="text_2")
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    return await _answer(server, body.model, "score", {"data": data}, made)


async def rerank(request: Request) -> Response:
    """Documents by how well they fit a query, the best one first."""
    server = server_of(request)
    body = parse(await read_json(request), RerankRequest, ignored=ignored_fields(request))
    server.check_task("score")
    query = await _contents(request, server, body, body.query, "query")
    contents = body.contents
    documents = await _contents(request, server, body, contents, "documents")
    with other_names({"text_1": "query", "text_2": "documents"}):
        scores, made = await _scores(request, server, body, body.pairs_of(query, documents), field="documents")
    order = sorted(range(len(documents)), key=lambda index: -scores[index])[: body.top_n or None]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if body.return_documents:
        for result in results:
            given, document = contents[result["index"]], documents[result["index"]]
            page = {"multi_modal": given.content} if isinstance(given, PageContent) else {}  # in vLLM's form
            result["document"] = {"text": "" if isinstance(document, Page) else document, **page}
    return await _answer(
        server, body.model, "rerank", {"results": results, "meta": {"api_version": {"version": "2"}}}, made
    )


async def _contents(
    request: Request,
    server: Server,
    body: PairsBody,
    given: str | PageContent | Sequence[str | PageContent],
    field: str,
) -> list[str | Page]:
    """One side of pairs, with its pictures read."""
    several = not isinstance(given, str | PageContent)
    values: Sequence[str | PageContent] = [given] if isinstance(given, str | PageContent) else given
    pages = sum(isinstance(value, PageContent) for value in values)
    if pages > MAX_CONVERSATIONS:
        problem = f"`{field}` has {pages} entries with `content`; at most {MAX_CONVERSATIONS} are allowed"
        raise ApiError(problem, param=field, code="invalid_value")
    if pages:
        server.check_model(body.model)
    found: list[str | Page] = []
    salt = cache_salt_of(request, body.cache_salt)
    for number, value in enumerate(values):
        if isinstance(value, PageContent):
            message = ChatMessage(role="user", content=value.content)
            name = f"{field}.{number}.content" if several else f"{field}.content"
            chat = ChatTemplateFields(messages=[message], add_generation_prompt=False)
            with other_names({r"messages\.0\.content": name, "messages": name}):
                pictures: list[Attachment] = []
                text = text_beside(message, None if server.pictures is None else pictures)
                if not pictures:
                    found.append(text)
                    continue
                prompt = await _conversation(request, server, chat, salt=salt)
            found.append(prompt if isinstance(prompt, str) else Page(prompt))
        else:
            found.append(value)
    return found


async def _conversation(
    request: Request,
    server: Server,
    chat: ChatTemplateFields,
    *,
    salt: str | None,
    tools: Sequence[Mapping[str, Any]] = (),
    cut: Truncation | None = None,
) -> str | Prompt:
    """What is read of a conversation: the prompt that a template makes or, where the model reads pages and texts each
    by itself, one page's, or a text."""
    owner, pictures = owner_of(request), server.pictures
    if pictures is not None and pictures.images.page and chat.chat_template is None and len(chat.messages) == 1:
        read = await page_or_text(server, chat, owner=owner)
        if isinstance(read, str):
            return read
        if cut is not None:
            raise ApiError(TRUNCATED_PICTURES, param="truncate_prompt_tokens", code="invalid_value")
        return Prompt(None, read.token_ids, None, read.media)
    record_of(request).ignored += unread_variables(chat, template_source(server, chat, with_tools=bool(tools)))
    prompt = await chat_prompt(server, chat, tools=tools, owner=owner, cache_salt=salt, truncation=cut)
    return Prompt(None, prompt.token_ids, None, prompt.media)


async def _scores(
    request: Request, server: Server, body: PooledBody, pairs: list[Compared], *, field: str
) -> tuple[list[float], list[PoolingRequestOutput]]:
    """Scores of the pairs, and the outputs that they follow from."""
    pooler = _pooler(server)
    inputs, params = pair_inputs(pairs, pooler), body.params(task=score_task(pooler))
    made = await made_vectors(request, server, body, inputs, params, field=field, most=MOST_COMPARED)
    size = CHARS_PER_TEXT * len(pairs) + sum(output.outputs.data.size for output in made)
    outputs = await off_loop(lambda: scored(made, pairs, pooler), size=size)
    return [output.outputs.score for output in outputs], made


async def _read(request: Request, texts: type[Texts], chats: type[Chats]) -> Texts | Chats:
    """The body: of texts or, where it has messages, of conversations."""
    data, ignored = await read_json(request), ignored_fields(request)
    if data.get("messages") is None:
        return parse(data, texts, ignored=ignored)
    return parse(data, chats, ignored=ignored)


async def _inputs(request: Request, server: Server, body: InputBody | ConversationBody) -> tuple[Sequence[Input], str]:
    """What is read, and the field that it is of."""
    if isinstance(body, InputBody):
        return body.inputs, "input"
    server.check_model(body.model)
    keep, texts, ignored = body.truncate_prompt_tokens, list[Input](), record_of(request).ignored
    cut = None if keep is None else Truncation(server.engine.info.max_model_len if keep == -1 else keep, "right", False)
    tools, named = await read_tools(body), len(ignored)
    salt = cache_salt_of(request, body.cache_salt)
    for name, chat in body.chats().items():
        del ignored[named:]  # each says the same of the fields that all have
        with other_names({"messages": name}):
            texts.append(await _conversation(request, server, chat, salt=salt, tools=tools, cut=cut))
    return texts, "messages"


async def _vectors(
    request: Request,
    server: Server,
    body: EmbeddingRequest | EmbeddingChatRequest | PoolingRequest | PoolingChatRequest,
    params: PoolingParams,
    *,
    name: str,
    kind: Literal["embedding", "pooling"],
    key: str,
) -> Response:
    inputs, field = await _inputs(request, server, body)
    if body.encoding_format == "bytes" and len(inputs) > MOST_DESCRIBED:
        raise ApiError(
            f"`{field}` has {len(inputs)} entries; a header describes at most {MOST_DESCRIBED} vectors "
            "(encoding_format bytes_only leaves it out)",
            param=field,
            code="invalid_value",
        )
    record_of(request).ignored.extend(body.without_effect())
    made = await made_vectors(request, server, body, inputs, params, field=field)
    if body.encoding_format in ("bytes", "bytes_only"):
        return await _bytes(server, body.model, name, body, made)
    # Clients that ask for base64 without a word on the order read it as little-endian on every machine.
    form = VectorForm(body.embed_dtype or "float32", body.endianness or "little")
    write = to_json if body.encoding_format == "float" else form.to_base64

    def data() -> list[dict[str, Any]]:
        return [{"index": index, "object": kind, key: write(output.outputs.data)} for index, output in enumerate(made)]

    return await _answer(server, body.model, name, {"data": await off_loop(data, size=_size(made))}, made)


async def _bytes(
    server: Server, model: str | None, name: str, body: VectorFields, made: Sequence[PoolingRequestOutput]
) -> Response:
    """Vectors one after another; in vLLM's header `metadata`, if it is wanted, where each begins and ends."""
    form = VectorForm(body.embed_dtype or "float32", body.endianness or "native")
    parts = await off_loop(lambda: [form.to_bytes(output.outputs.data) for output in made], size=_size(made))
    headers, described, start = {}, [], 0
    for index, (part, output) in enumerate(zip(parts, made, strict=True)):
        described.append(
            {
                "index": index,
                "embed_dtype": form.type,
                "endianness": form.order,
                "start": start,
                "end": start + len(part),
                "shape": output.outputs.data.shape,
            }
        )
        start += len(part)
    if body.encoding_format == "bytes":
        headers["metadata"] = orjson.dumps(_envelope(server, model, name, {"data": described}, made)).decode()
    return Response(b"".join(parts), media_type="application/octet-stream", headers=headers)


async def made_vectors(
    request: Request,
    server: Server,
    body: PooledBody,
    inputs: Sequence[Input],
    params: PoolingParams,
    *,
    field: str,
    most: int = MOST_NUMBERS,
) -> list[PoolingRequestOutput]:
    """What the engine makes of all inputs, in their order; some of them at a time, so that a long list does not fill
    the queue, and nobody has to wait for all of it. Nothing is made before all of them are known to be right.

    Args:
        field: the request's field that holds the inputs.
        most: numbers that all vectors may have together.
    """
    server.check_model(body.model)
    server.request_limits.check_priority(body.priority)
    own_name = body.request_id or record_of(request).id
    salt, priority = cache_salt_of(request, body.cache_salt), body.priority or 0
    adaptation = server.adaptation(body.model)
    outputs_by_index: dict[int, PoolingRequestOutput] = {}

    async def work(waiting: Iterator[tuple[int, PooledTokens]]) -> None:
        for index, tokens in waiting:
            name = engine_id(own_name, record_of(request).owner)
            stream = server.engine.encode(
                tokens, params, name, priority=priority, cache_salt=salt, lora_request=adaptation
            )
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    outputs_by_index[index] = output
            await asyncio.sleep(0)

    async def all_of_it() -> None:
        plain = isinstance(body, TextsBody) and body.add_special_tokens is False
        waiting = enumerate(await _tokens(server, inputs, params, field=field, most=most, plain=plain))
        count = min(len(inputs), 2 * server.engine.config.max_num_seqs)
        workers = [asyncio.create_task(work(waiting)) for _ in range(count)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    record = record_of(request)
    await guarded(request.receive, all_of_it(), timeout=server.config.request_timeout)
    made = [outputs_by_index[index] for index in range(len(inputs))]
    record.prompt_tokens = sum(len(output.prompt_token_ids) for output in made)
    if any(output.error is not None for output in made):
        raise ApiError("the request was aborted", status=503, code="aborted", headers={"Retry-After": "1"})
    return made


async def _tokens(
    server: Server,
    inputs: Sequence[Input],
    params: PoolingParams,
    *,
    field: str,
    most: int,
    plain: bool = False,
) -> list[PooledTokens]:
    """What the engine reads.

    Args:
        most: numbers that all vectors may have together.
        plain: texts are read without special tokens.

    Raises:
        ApiError: there would be more numbers.
        InvalidRequest: an input is wrong; it names ``field``.
    """
    size = min(params.dimensions or _pooler(server).size, _pooler(server).size)
    _check_numbers(size * len(inputs), field, most)
    rows: list[PooledTokens] = []

    def take(some: Sequence[Input]) -> None:
        for one in some:
            prompt: Any = {"prompt_token_ids": one} if isinstance(one, list) else one
            rows.append(server.engine.pooled_tokens(prompt, params, add_special_tokens=not plain))

    try:
        at = 0
        while at < len(inputs):
            end, chars = at, 0.0
            while end < len(inputs) and chars < SLICE_CHARS:
                chars += _num_chars(inputs[end])
                end += 1
            # What a template is for is sent to another process, whose answer a thread awaits.
            rendered = server.engine.renders_pairs and isinstance(inputs[at], TextPair)
            await off_loop(partial(take, inputs[at:end]), size=SLICE_CHARS if rendered else int(chars))
            at = end
    except InvalidRequest as error:
        error.field = field if error.field == "prompt" else error.field
        raise
    if rows[0].of_tokens:
        _check_numbers(size * sum(len(tokens.token_ids) for tokens in rows), field, most)
    return rows


def _num_chars(one: Input) -> float:
    """The work of tokenizing or checking an input, as a number of characters of text that take as long."""
    if isinstance(one, TextPair):
        return CHARS_PER_TEXT + len(one.first) + len(one.second)
    if isinstance(one, Side):
        return CHARS_PER_TEXT + (0 if isinstance(one.content, Page) else len(one.content))
    one = one.token_ids if isinstance(one, Prompt) else one
    return CHARS_PER_TEXT + len(one) * (1 if isinstance(one, str) else CHARS_PER_ID)


def _check_numbers(count: int, field: str, most: int) -> None:
    if count > most:
        raise ApiError(
            f"`{field}`: its vectors would have {count} numbers together; at most {most} are allowed",
            param=field,
            code="invalid_value",
        )


def _size(made: Sequence[PoolingRequestOutput]) -> int:
    """The work of writing outputs, as a number of characters of text that take as long to encode."""
    numbers = sum(output.outputs.data.size for output in made)
    return int(CHARS_PER_TEXT * len(made) + CHARS_PER_NUMBER * numbers)


def _pooler(server: Server) -> PoolerInfo:
    pooler = server.engine.info.pooler
    assert pooler is not None  # as ``check_task`` has found
    return pooler


def _usage(made: Sequence[PoolingRequestOutput]) -> dict[str, Any]:
    tokens = sum(len(output.prompt_token_ids) for output in made)
    cached = sum(output.num_cached_tokens for output in made)
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _envelope(
    server: Server, model: str | None, name: str, own: dict[str, Any], made: Sequence[PoolingRequestOutput]
) -> dict[str, Any]:
    return {
        "id": f"{name}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": server.answer_name(model),
        **own,
        "usage": _usage(made),
    }


async def _answer(
    server: Server, model: str | None, name: str, own: dict[str, Any], made: Sequence[PoolingRequestOutput]
) -> Response:
    whole = _envelope(server, model, name, own, made)
    content = await off_loop(lambda: orjson.dumps(whole), size=_size(made))
    return Response(content, media_type="application/json")


POOLING_ROUTES = [
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    Route("/v2/embed", cohere_embed, methods=["POST"]),
    Route("/pooling", pooling, methods=["POST"]),
    Route("/classify", classify, methods=["POST"]),
    *(Route(path, score, methods=["POST"]) for path in ("/score", "/v1/score")),
    *(Route(path, rerank, methods=["POST"]) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
]
