"""Reads a request's JSON body into a protocol type: size, content type, syntax and fields are checked here, once."""

from __future__ import annotations

import asyncio
import difflib
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from llmjax.serve.content_coding import decoder_of
from llmjax.serve.context import shared_of
from llmjax.serve.errors import MAX_NAME_CHARS, ApiError, ClientDisconnected, cut, unsupported
from llmjax.serve.json_gauge import JsonGauge
from llmjax.serve.json_text import JsonText
from llmjax.serve.limits import BodyLimits
from llmjax.serve.protocol.common import ApiModel, IgnoredFields

# Slower than any real line, and it ends a body that comes byte by byte.
MIN_BYTES_PER_SECOND = 1000
LARGE_BYTES = 32 * 1024  # a millisecond's work at most
READ = "llmjax.body"  # in a request's scope: what has been read to choose a route by

M = TypeVar("M", bound=ApiModel)

TYPE_NAMES = frozenset({"str", "int", "float", "bool", "dict"})


async def read_json(request: Request, *, any_type: bool = False) -> dict[str, Any]:
    """The body, which must be a JSON object; arguments and errors as for ``read_value``."""
    data = await read_value(request, any_type=any_type)
    if not isinstance(data, dict):
        raise ApiError("the body must be a JSON object", code="invalid_json")
    return data


async def read_value(request: Request, *, any_type: bool = False) -> Any:
    """The body, which must be JSON within the server's ``BodyLimits``; nothing is parsed before that is known.

    Args:
        any_type: whether ``Content-Type`` may be another, such as curl's own; other origins' pages are refused anyway.

    Raises:
        ApiError: 400, 408, 413 or 415.
        ClientDisconnected: the client went away while sending.
    """
    if READ in request.scope:
        return request.scope.pop(READ)
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if not any_type and media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(f"Content-Type must be application/json, not {media_type or 'absent'}", status=415)
    server = shared_of(request)
    text = await _read(request, server.limits, patience=server.config.read_timeout)
    raw = text.short.removeprefix(BOM_UTF8)
    await _let_others(raw)
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if text.has_marks:
        data = await asyncio.to_thread(text.restore, data)
    await _let_others(raw)  # the caller makes objects of it next
    return data


def parse(data: dict[str, Any], model: type[M], *, ignored: list[str] | None = None) -> M:
    """Validate a decoded body; a missing, unknown, ill-typed or unsupported field is an ``ApiError`` naming it.

    Args:
        ignored: takes the names of unknown fields, which are left out then; see ``ignored_fields``.
    """
    try:
        body = model.model_validate(data, context=None if ignored is None else IgnoredFields(ignored))
    except ValidationError as error:
        raise _explain(error, model) from None
    for field, neutral in model.neutral_values.items():
        value = getattr(body, field)
        # Type too: in Python False == 0 and True == 1.
        if not any(type(value) is type(ok) and value == ok for ok in (None, *neutral)):
            raise unsupported(field, model.reasons.get(field, "is not supported yet"))
    return body


async def _read(request: Request, limits: BodyLimits, *, patience: float) -> JsonText:
    """The body.

    Args:
        patience: seconds that a body may take, on top of those that its bytes take at ``MIN_BYTES_PER_SECOND``.
    """
    too_large = ApiError(
        f"the body is larger than {limits.bytes} bytes",
        status=413,
        code="body_too_large",
        headers={"Connection": "close"},  # the rest of it is not a request
    )
    decoder = decoder_of(", ".join(request.headers.getlist("content-encoding")))
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limits.bytes:
        raise too_large
    gauge = JsonGauge(limits)
    text = JsonText()
    size = whole = 0
    end = asyncio.get_running_loop().time() + patience
    try:
        async with asyncio.timeout_at(end) as timer:
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.bytes:
                    raise too_large
                timer.reschedule(end + size / MIN_BYTES_PER_SECOND)
                for part in _cut(chunk) if decoder is None else decoder.pieces(chunk, LARGE_BYTES):
                    whole += len(part)
                    if whole > limits.bytes:
                        raise too_large
                    within = gauge.feed(part)
                    if not gauge.exceeded:
                        text.add(part, within=within, inside=gauge.inside)
                    if whole > size:  # little may stand for much
                        await asyncio.sleep(0)
                if gauge.exceeded:  # what is too much is still read to its end, as clients expect, but not kept
                    text.clear()
    except ClientDisconnect:
        raise ClientDisconnected from None
    except TimeoutError:
        raise ApiError(
            f"the body did not arrive in time: {size} bytes came",
            status=408,
            code="request_timeout",
            headers={"Connection": "close"},
        ) from None
    if decoder is not None:
        decoder.finish()
    gauge.check()
    return text


def _cut(chunk: bytes) -> Iterator[bytes]:
    for at in range(0, len(chunk), LARGE_BYTES):
        yield chunk[at : at + LARGE_BYTES]


async def _let_others(raw: bytes) -> None:
    """Between two pieces of work on a large body every stream gets a turn."""
    if len(raw) > LARGE_BYTES:
        await asyncio.sleep(0)


def _explain(error: ValidationError, model: type[ApiModel]) -> ApiError:
    details = error.errors(include_url=False, include_context=False)
    field = [detail for detail in details if detail["loc"][:1] == details[0]["loc"][:1]]
    first = max(
        field, key=lambda detail: len(_path(detail["loc"]))
    )  # of a union's members, the one that fitted furthest
    path = _path(first["loc"])
    param = ".".join(path)
    if first["type"] == "extra_forbidden":
        name = cut(str(first["loc"][-1]))
        param = ".".join([*_path(first["loc"][:-1]), name])
        near = difflib.get_close_matches(name, model.model_fields, n=1) if param == name else []
        hint = f"; did you mean `{near[0]}`?" if near else ""
        return ApiError(f"unknown field `{param}`{hint}", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(f"`{param}` is required", param=param, code="missing_required_parameter")
    reasons = list(dict.fromkeys(_reason(detail) for detail in field if _path(detail["loc"]) == path))
    text = " or ".join(r[0].lower() + r[1:] for r in reasons).replace("input should be", "must be")
    return ApiError(f"`{param}`: {text}", param=param, code="invalid_type")


def _reason(detail: ErrorDetails) -> str:
    # JSON's integers of more than 64 bits are read as floats.
    if detail["type"] == "int_type" and isinstance(detail["input"], float) and abs(detail["input"]) >= 2**63:
        return f"Input should be an integer in [{-(2**63)}, {2**63 - 1}]"
    return detail["msg"]


def _path(loc: tuple[int | str, ...]) -> list[str]:
    """Where the error is. Pydantic also names the members of a union ("str", "list[int]"), which users do not know."""
    return [
        cut(str(p)) for p in loc if isinstance(p, int) or (p[:MAX_NAME_CHARS].isidentifier() and p not in TYPE_NAMES)
    ]
