"""What happens around every route: request id and access log, and the gate that closes on shutdown."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from urllib.parse import quote

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmjax.serve.context import KEY, RequestRecord, new_id, path_of
from llmjax.serve.drain import Closing, Gate
from llmjax.serve.errors import ApiError, as_api_error, retry_later

access_log = logging.getLogger("llmjax.serve.access")

PROBES = frozenset({"/health", "/ping", "/metrics"})  # asked every few seconds: worth a line only when they fail


class ProxyPrefix:
    """Lets a proxy leave the prefix under which it has the server, ``root_path``, on a path, or take it off: uvicorn
    puts it in front of every path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "")
        if root and scope["type"] == "http" and f"{path_of(scope)}/".startswith(f"{root}/"):
            raw_path = scope["raw_path"].removeprefix(root.encode())
            scope = {**scope, "path": path_of(scope), "raw_path": raw_path}
        await self._app(scope, receive, send)


class RequestLog:
    """Gives each request its id, writes one JSON line when it is over, and answers 500 for what nobody caught.

    Args:
        enabled: write the line.
        id_header: answer with ``X-Request-Id``.
    """

    def __init__(self, app: ASGIApp, *, enabled: bool, id_header: bool) -> None:
        self._app = app
        self._enabled = enabled
        self._id_header = id_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        # The key of a line of a batch is known already, others are checked after this.
        record = RequestRecord(id=new_id(Headers(scope=scope)), started=time.perf_counter(), owner=state.get(KEY, ""))
        state["record"] = record

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if record.ignored:
                    MutableHeaders(scope=message)["x-ignored-fields"] = _header(record.ignored)
                if record.moved_lines:
                    MutableHeaders(scope=message)["x-moved-lines"] = str(record.moved_lines)
                if self._id_header:
                    MutableHeaders(scope=message)["x-request-id"] = record.id
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            failure = as_api_error(error)
            record.error = failure.message
            if record.status == 0:
                await failure.response(scope["path"], record.id)(scope, receive, noting)
        finally:
            if self._enabled:
                quiet = scope["path"] in PROBES and record.status < 400
                access_log.log(logging.DEBUG if quiet else logging.INFO, _line(scope, record))


def _header(names: list[str]) -> str:
    """Names of fields as the value of a header."""
    return ",".join(quote(name, safe=".") for name in names)


def _line(scope: Scope, record: RequestRecord) -> str:
    fields = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "request_id": record.id,
        "client": (scope.get("client") or [None])[0],
        "method": scope["method"],
        "path": scope["path"],
        "model": record.model,
        "status": record.status,
        "ms": round(1000 * (time.perf_counter() - record.started), 1),
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "user": record.user,
        "session": record.session,
        "metadata": record.metadata,
        "ignored": record.ignored or None,
        "moved_lines": record.moved_lines or None,
        "error": record.error,
    }
    return orjson.dumps({name: value for name, value in fields.items() if value is not None}).decode()


class DrainGate:
    """Counts the requests that do work; turns new ones away once the gate is closed, and those that have not come
    wholly."""

    def __init__(self, app: ASGIApp, *, gate: Gate, retry_after: float) -> None:
        self._app = app
        self._gate = gate
        self._retry_after = retry_after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._gate.closed:
            raise self._refusal()

        hurried = self._gate.until_closed(receive)

        async def whole() -> Message:
            try:
                return await hurried()
            except Closing:
                raise self._refusal() from None

        with self._gate.passing():
            await self._app(scope, whole, send)

    def _refusal(self) -> ApiError:
        error = retry_later("the server is shutting down", seconds=self._retry_after, code="shutting_down")
        error.headers["Connection"] = "close"
        return error
