"""Whatever JSON comes, validation ends in a request or in one clear error."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmjax.errors import InvalidRequest
from llmjax.sampling.params import RequestOutputKind
from llmjax.serve.body import parse, read_json
from llmjax.serve.errors import ApiError
from llmjax.serve.limits import BodyLimits
from llmjax.serve.protocol.chat import BatchChatRequest, ChatMessage, ChatRequest, template_messages
from llmjax.serve.protocol.common import GenerationRequest, StreamOptions, sampling_params
from llmjax.serve.protocol.completions import CompletionRequest
from llmjax.serve.protocol.generate import GenerateRequest, GenerativeScoringRequest
from llmjax.serve.protocol.pooling import CohereEmbedRequest
from llmjax.serve.protocol.tokens import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest

MODELS: list[Any] = [ChatRequest, CompletionRequest, TokenizeChatRequest, TokenizeTextRequest, DetokenizeRequest]
OTHERS: list[Any] = [ChatMessage, StreamOptions, BatchChatRequest, CohereEmbedRequest]
OTHERS += [GenerateRequest, GenerativeScoringRequest]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=6,
)


def test_every_field_of_openais_api_is_known() -> None:
    known = ChatRequest.model_fields.keys()
    assert set(ChatParams.__annotations__) | set(ChatParams.__mro__[0].__annotations__) <= known | {"stream"}
    assert set(CompletionParams.__annotations__) <= CompletionRequest.model_fields.keys() | {"stream"}


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=150)
@given(data=st.data())
def test_random_fields(model: Any, data: st.DataObject) -> None:
    names = st.sampled_from(sorted(model.model_fields)) | st.text(max_size=8)
    body = data.draw(st.dictionaries(names, json_values, max_size=4))
    base: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}],
        "prompt": "x",
        "tokens": [1],
    }
    full = {**{name: value for name, value in base.items() if name in model.model_fields}, **body}
    try:
        parsed = parse(full, model)
        if isinstance(parsed, ChatRequest):
            template_messages(parsed.messages)
            assert parsed.requested_tokens is None or parsed.requested_tokens in body.values()
        if isinstance(parsed, CompletionRequest):
            assert all(isinstance(prompt, str | list) for prompt in parsed.prompts)
        if isinstance(parsed, GenerationRequest):
            sampling_params(parsed, defaults={}, max_tokens=5, logprobs=None, detokenize=True)
    except ApiError as error:
        assert error.status == 400 and error.message and "\n" not in error.message
    except InvalidRequest as error:
        assert error.field in model.model_fields


@pytest.mark.parametrize("wrong", [1, "x", None, 1.5, [], {}, {"a": 1}], ids=str)
@pytest.mark.parametrize("model", [*MODELS, *OTHERS])
def test_many_wrong_entries_are_few_errors(model: Any, wrong: Any) -> None:
    """Pydantic makes an object of each error, and there may be as many as a body has values."""
    base: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}],
        "prompt": "x",
        "tokens": [1],
        "role": "user",
    }
    required = {name: value for name, value in base.items() if name in model.model_fields}
    for field in model.model_fields:
        for many in ([wrong] * 1000, {str(i): wrong for i in range(1000)}):
            try:
                model.model_validate({**required, field: many})
            except ValidationError as error:
                assert error.error_count() < 10, field


@pytest.mark.parametrize("model", MODELS)
def test_neutral_values_belong_to_fields_and_pass(model: Any) -> None:
    base: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "tokens": [1]}
    required = {name: value for name, value in base.items() if name in model.model_fields}
    for field, neutral in model.neutral_values.items():
        for value in (None, *neutral):
            parse({**required, field: value}, model)
        with pytest.raises(ApiError) as error:
            parse({**required, field: {"not": "neutral"}}, model)
        assert error.value.param == field and error.value.code == "unsupported_parameter"


def test_given_fields_win_over_the_models_defaults() -> None:
    body = parse({"prompt": "x", "temperature": 0.5, "logit_bias": {"7": -1}}, CompletionRequest)
    defaults = {"temperature": 0.1, "top_k": 64, "repetition_penalty": 1.1}
    params = sampling_params(body, defaults=defaults, max_tokens=9, logprobs=2, detokenize=True)
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.5, 64, 1.1)
    assert params.max_tokens == 9 and params.logprobs == 2 and params.logit_bias == {7: -1.0}
    assert params.output_kind is RequestOutputKind.FINAL_ONLY


LIMIT = 100_000


def sent(body: bytes, *, chunk: int = 1000, **headers: str) -> httpx.Response:
    """What becomes of a body: its value as JSON, or an error."""

    async def echo(request: Request) -> Response:
        try:
            return Response(orjson.dumps(await read_json(request)))
        except ApiError as error:
            return error.response("/", "id")

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(body), chunk):
            yield body[at : at + chunk]

    app = Starlette(routes=[Route("/", echo, methods=["POST"])])
    app.state.shared = SimpleNamespace(limits=BodyLimits(bytes=LIMIT), config=SimpleNamespace(read_timeout=60))

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            given = {"content-type": "application/json", **{name.replace("_", "-"): v for name, v in headers.items()}}
            return await client.post("/", content=chunks(), headers=given)

    return asyncio.run(main())


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_compressed_body_is_read(chunk: int) -> None:
    value = {"prompt": "é" * 2000, "n": [1, 2, {"a": None}]}
    whole = gzip.compress(orjson.dumps(value))
    assert sent(whole, chunk=chunk, content_encoding="gzip").json() == value
    assert code_of(sent(whole[:-1], chunk=chunk, content_encoding="gzip")) == (400, "invalid_content_encoding")
    assert code_of(sent(whole, content_encoding="br")) == (415, "unsupported_content_encoding")
    assert code_of(sent(whole)) == (400, "invalid_json")


@pytest.mark.parametrize("size", [LIMIT + 1, 100 * 2**20])
def test_a_bomb_is_refused_before_it_has_grown(size: int) -> None:
    bomb = gzip.compress(b'{"prompt": "' + b"x" * size)
    assert len(bomb) < LIMIT + 5000
    response = sent(bomb, content_encoding="gzip")
    assert code_of(response) == (413, "body_too_large") and response.headers["connection"] == "close"
    most = gzip.compress(b'{"prompt": "' + b"x" * (LIMIT - 14) + b'"}')
    assert len(sent(most, content_encoding="gzip").json()["prompt"]) == LIMIT - 14


def test_a_long_body_that_stands_for_little_is_refused() -> None:
    empty = gzip.compress(b"")
    some = gzip.compress(b'{"a": 1}') + empty * ((LIMIT - 100) // len(empty))
    assert sent(some, content_encoding="gzip").json() == {"a": 1}
    response = sent(some + empty * 10, content_encoding="gzip")
    assert code_of(response) == (413, "body_too_large") and response.headers["connection"] == "close"


@pytest.mark.parametrize("length", [True, False])
def test_what_is_too_large_ends_the_connection(length: bool) -> None:
    headers = {"content_length": str(LIMIT + 1)} if length else {}
    response = sent(b" " * (LIMIT + 1), **headers)
    assert code_of(response) == (413, "body_too_large") and response.headers["connection"] == "close"


@pytest.mark.parametrize("chunk", [1, 2, 1000])
def test_a_byte_order_mark_is_passed_over(chunk: int) -> None:
    assert sent(b"\xef\xbb\xbf" + b'{"a": 1}', chunk=chunk).json() == {"a": 1}
    assert code_of(sent(b"\xef\xbb\xbf" * 2 + b'{"a": 1}', chunk=chunk)) == (400, "invalid_json")


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_half_a_character_becomes_a_replacement(chunk: int) -> None:
    body = rb'{"cut \ud83d": "\ude00 \ud83d\ude00 \\ud83d \\\ud83d\\\\\uDC00 \uD83D\uD83D\ude00 \ud83dx"}'
    expected = {"cut \ufffd": "\ufffd \U0001f600 \\ud83d \\\ufffd\\\\\ufffd \ufffd\U0001f600 \ufffdx"}
    assert sent(body, chunk=chunk).json() == expected


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(st.sampled_from(["\ud83d", "\ude00", "\\", "u", "d", "8", "3", "😀", "\n"])), chunk=st.integers(1, 40)
)
def test_any_text_with_halves_of_characters_is_read(text: str, chunk: int) -> None:
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert sent(json.dumps({"a": text}).encode(), chunk=chunk).json() == {"a": expected}
