"""Which of several models a request is for: found by its name, and loaded if need be, before its route is called.

A stream that waits for its model gets signs of life, as one does that waits for its tokens. Where the route then fails,
what would have been an error with a status is an error in the stream.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import orjson
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmjax.durations import parse_duration
from llmjax.serve.body import READ, read_json
from llmjax.serve.context import CHOSEN, RequestRecord, Server, path_of
from llmjax.serve.errors import ANTHROPIC, OLLAMA, ApiError, as_api_error
from llmjax.serve.generation import guarded
from llmjax.serve.ollama.conversation import bare
from llmjax.serve.ollama.lines import MEDIA_TYPE as LINES
from llmjax.serve.several import SeveralModels
from llmjax.serve.sse import DONE, KEEP_ALIVE
from llmjax.serve.sse import HEADERS as STREAM_HEADERS

RESPONSES = "/v1/responses"
SPACE = b" "  # between lines of JSON it says nothing


class ModelChoice:
    """Has the routes of models find theirs, and keeps it there until they have answered.

    Args:
        models: all models.
        paths: the paths of these routes.
        in_query: those of them that name the model in the query, not in the body.
        any_type: those of them whose bodies may have any Content-Type.
        interval: seconds between the signs of life of a stream that waits; 0: there are none.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        models: SeveralModels,
        paths: frozenset[str],
        in_query: frozenset[str],
        any_type: frozenset[str],
        interval: float,
    ) -> None:
        self._app = app
        self._models = models
        self._paths = paths
        self._in_query = in_query
        self._any_type = any_type
        self._interval = interval

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or path_of(scope) not in self._paths:
            await self._app(scope, receive, send)
            return
        path, request = path_of(scope), Request(scope, receive)
        body: dict[str, Any] = {}
        if scope["method"] == "POST" and path not in self._in_query:
            scope[READ] = body = await read_json(request, any_type=path in self._any_type)
        entry = self._models.find(self._name(path, body.get("model", request.query_params.get("model"))))
        record: RequestRecord = scope["state"]["record"]
        record.model = entry.name
        keep_alive = keep_alive_of(body) if path.startswith(OLLAMA) else None
        if keep_alive == 0 and asks_nothing(path, body):
            await self._app(scope, receive, send)  # it only wants the model to go
            return
        if keep_alive is not None:
            del body["keep_alive"]  # it has had its effect
        stream = _Stream(path, send) if self._interval and streams(path, body) else None
        async with AsyncExitStack() as stack:
            using = self._models.using(entry.name, keep_alive=keep_alive)
            try:
                if self._models.is_there(entry.name):
                    server = await stack.enter_async_context(using)
                else:
                    server = await guarded(receive, self._enter(stack, using, stream), timeout=None)
            except Exception as error:
                if stream is None or not stream.started:
                    raise
                failure = as_api_error(error)
                record.error = failure.message
                await stream.fail(failure, record.id)
                return
            scope["state"][CHOSEN] = server
            await self._app(scope, receive, send if stream is None or not stream.started else stream.send)

    @staticmethod
    def _name(path: str, wanted: Any) -> str | None:
        if wanted is None or wanted == "":
            return None
        if not isinstance(wanted, str):
            raise ApiError("`model`: must be a valid string", param="model", code="invalid_type")
        return bare(wanted) if path.startswith(OLLAMA) else wanted

    async def _enter(
        self, stack: AsyncExitStack, using: AbstractAsyncContextManager[Server], stream: _Stream | None
    ) -> Server:
        if stream is None:
            return await stack.enter_async_context(using)
        entering = asyncio.ensure_future(stack.enter_async_context(using))
        try:
            while True:
                done, _ = await asyncio.wait({entering}, timeout=self._interval)
                if done:
                    return entering.result()
                await stream.stay_alive()
        finally:
            entering.cancel()
            await asyncio.gather(entering, return_exceptions=True)


def asks_nothing(path: str, body: dict[str, Any]) -> bool:
    """Whether a request of Ollama's says nothing to the model: it is about its being loaded."""
    return (path == "/api/chat" and not body.get("messages")) or (
        path == "/api/generate" and not body.get("prompt") and not body.get("suffix")
    )


def streams(path: str, body: dict[str, Any]) -> bool:
    """Whether the answer to a request is a stream."""
    if path in ("/api/chat", "/api/generate"):
        return body.get("stream") is not False
    return body.get("stream") is True and not path.startswith(OLLAMA)


def keep_alive_of(body: dict[str, Any]) -> float | None:
    """Seconds that a request of Ollama's wants its model to stay; None: it does not say."""
    value = body.get("keep_alive")
    if value is None or isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        return parse_duration(value)
    except ValueError:
        raise ApiError(
            f"`keep_alive` must be a duration such as 5m, or a number of seconds, not {value!r:.100}",
            param="keep_alive",
            code="invalid_value",
        ) from None


class _Stream:
    """An answer that has begun with signs of life, before its route was called."""

    def __init__(self, path: str, send: Send) -> None:
        self._path = path
        self._send = send
        self._lines = path.startswith(OLLAMA)
        self.started = False
        self._failing: bytes | None = None  # what has come of an error's body
        self._status = 200

    async def stay_alive(self) -> None:
        if not self.started:
            self.started = True
            kind = LINES if self._lines else "text/event-stream; charset=utf-8"
            headers = [(b"content-type", kind.encode()), *STREAM_HEADERS]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._write(SPACE if self._lines else KEEP_ALIVE)

    async def send(self, message: Message) -> None:
        """What the route sends, but for the beginning, which has been sent."""
        if message["type"] == "http.response.start":
            if message["status"] >= 400:
                self._failing = b""
            return
        if self._failing is None:
            await self._send(message)
            return
        self._failing += message.get("body", b"")
        if not message.get("more_body", False):
            await self._write(self._error(orjson.loads(self._failing)), more=False)

    async def fail(self, failure: ApiError, request_id: str) -> None:
        """Ends the stream with an error."""
        response = failure.response(self._path, request_id)
        await self._write(self._error(orjson.loads(response.body)), more=False)

    def _error(self, body: dict[str, Any]) -> bytes:
        """An error's body as the stream of its API has it."""
        data = orjson.dumps(body)
        if self._lines:
            return data + b"\n"
        if self._path.startswith(ANTHROPIC):
            return b"event: error\ndata: " + data + b"\n\n"
        if self._path.startswith(RESPONSES):
            error = {**body["error"], "type": "error", "sequence_number": 0}
            return b"event: error\ndata: " + orjson.dumps(error) + b"\n\n"
        return b"data: " + data + b"\n\n" + DONE

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
