"""Lines of a batch: a request each, and its result, as OpenAI and vLLM write them."""

from __future__ import annotations

import uuid
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from llmjax.errors import InvalidRequest
from llmjax.serve.batches.inner import Answer
from llmjax.serve.errors import cut
from llmjax.serve.json_gauge import JsonGauge
from llmjax.serve.json_text import without_lone_surrogates
from llmjax.serve.limits import BodyLimits

ENDPOINTS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"),
        "/v2/embed",
        *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/classify", "/pooling"),
    }
)
BINARY = ("bytes", "bytes_only")  # forms of vectors
MAX_ID = 512  # characters of a custom_id
ENVELOPE_BYTES = 4096  # of a line, beside its body
ENVELOPE_NODES = 8


class BadLine(InvalidRequest):
    """A line is not a request.

    Args:
        line: its number, from 1.
    """

    def __init__(self, message: str, *, line: int, field: str | None = None) -> None:
        super().__init__(f"line {line}: {message}", field=field)
        self.line = line


@dataclass(frozen=True)
class BatchLine:
    """A request.

    Args:
        body: as JSON.
    """

    custom_id: str
    url: str
    body: bytes


def read_lines(lines: Iterable[bytes], limits: BodyLimits, *, endpoint: str | None = None) -> Iterator[BatchLine]:
    """The requests of a file; empty lines are passed over.

    Args:
        limits: limits on each body.
        endpoint: the endpoint that all must name; None: any of ``ENDPOINTS``.

    Raises:
        BadLine: one is not a request, is too large, or has the id of another.
    """
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if number == 1:
            line = line.removeprefix(BOM_UTF8)
        if not line.strip():
            continue
        request = _read(line, number, limits, endpoint)
        if request.custom_id in seen:
            raise BadLine(f"the custom_id {cut(request.custom_id)!r} is used twice", line=number, field="custom_id")
        seen.add(request.custom_id)
        yield request


def _read(line: bytes, number: int, limits: BodyLimits, endpoint: str | None) -> BatchLine:
    outer = BodyLimits(
        bytes=limits.bytes + ENVELOPE_BYTES,
        values=limits.values + ENVELOPE_NODES,
        nodes=limits.nodes + ENVELOPE_NODES,
        depth=limits.depth + 1,
    )
    if len(line) > outer.bytes:
        raise BadLine(f"it is larger than {outer.bytes} bytes", line=number)
    gauge = JsonGauge(outer)
    gauge.feed(line)
    if gauge.exceeded:
        raise BadLine("it holds too many values, or is nested too deeply", line=number)
    try:
        fields = orjson.loads(without_lone_surrogates(line))
    except orjson.JSONDecodeError as error:
        raise BadLine(f"it is not valid JSON: {error}", line=number) from None
    if not isinstance(fields, dict):
        raise BadLine("it is not a JSON object", line=number)
    custom_id, method, url, body = (fields.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID:
        message = f"`custom_id` must be a string of at most {MAX_ID} characters"
        raise BadLine(message, line=number, field="custom_id")
    if method != "POST":
        raise BadLine("`method` must be POST", line=number, field="method")
    if not isinstance(url, str) or url not in (ENDPOINTS if endpoint is None else (endpoint,)):
        wanted = f"one of {', '.join(sorted(ENDPOINTS))}" if endpoint is None else f"{endpoint}, like the batch's"
        raise BadLine(f"`url` must be {wanted}", line=number, field="url")
    if not isinstance(body, dict):
        raise BadLine("`body` must be an object", line=number, field="body")
    if body.get("stream") or body.get("background"):
        raise BadLine("answers in a batch come whole, not as a stream or in the background", line=number, field="body")
    if body.get("encoding_format") in BINARY:
        raise BadLine("answers in a batch are JSON: encoding_format must be float or base64", line=number, field="body")
    return BatchLine(custom_id, url, orjson.dumps(body))


def result_line(custom_id: str, answer: Answer, *, prefix: str, apart: bool) -> bytes:
    """The result of a request.

    Args:
        prefix: prefix of its id.
        apart: an error stands beside the response, as vLLM has it, not in its body.
    """
    failed = answer.status >= 400
    body = orjson.Fragment(answer.body)
    response: dict[str, Any] = {"status_code": answer.status, "request_id": answer.request_id}
    response["body"] = None if failed and apart else body
    result = {
        "id": f"{prefix}{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": body if failed and apart else None,
    }
    return orjson.dumps(result, option=orjson.OPT_APPEND_NEWLINE)
