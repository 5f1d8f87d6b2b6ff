"""Server-sent events: one response class that streams, keeps idle connections open and ends cleanly."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from llmjax.serve.errors import ApiError, ClientDisconnected, as_api_error
from llmjax.serve.generation import guarded

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
]


# Choices of one token, with what names its fields, are shorter than this.
OBFUSCATION_BLOCK = 128  # bytes


def event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    """An event that is called by its ``type``."""
    return b"event: " + data["type"].encode() + b"\n" + event(data)


def _error_event(failure: ApiError) -> bytes:
    return event(failure.body())


def delta_event(chunk: dict[str, Any], *, obfuscate: bool) -> bytes:
    """A chunk of an answer as an event.

    Args:
        chunk: a chunk with its ``choices``.
        obfuscate: see `obfuscated`.
    """
    return event(obfuscated(chunk, "choices") if obfuscate else chunk)


def obfuscated(data: dict[str, Any], field: str) -> dict[str, Any]:
    """Adds random characters, as OpenAI does, so that an observer of the sizes of encrypted packets cannot tell from
    them how long each token is: ``field`` and padding fill whole blocks."""
    missing = -len(orjson.dumps(data[field])) % OBFUSCATION_BLOCK
    return {**data, "obfuscation": secrets.token_urlsafe(missing)[:missing]}


class EventStream:
    """An ASGI response that sends ``events`` as they come.

    Nothing is sent before the first event or the first keep-alive, so an error before it still has its HTTP status;
    a later one becomes an error event. The events are closed as soon as the client goes away.

    Args:
        events: what ``encode`` makes complete server-sent events of, without ``end``.
        keep_alive: seconds of silence after which a comment is sent; 0: never.
        timeout: seconds the whole stream may take, or None.
        end: what the API ends its streams with.
        failed: the API's event for an error.
        encode: makes the bytes that are sent.
        media_type: what the whole is.
    """

    def __init__(
        self,
        events: AsyncGenerator[Any, None],
        *,
        keep_alive: float,
        timeout: float | None,
        end: bytes = DONE,
        failed: Callable[[ApiError], bytes] = _error_event,
        encode: Callable[[Any], bytes] = bytes,
        media_type: str = "text/event-stream; charset=utf-8",
    ) -> None:
        self._events = events
        self._keep_alive = keep_alive
        self._timeout = timeout
        self._end = end
        self._failed = failed
        self._encode = encode
        self._headers = [(b"content-type", media_type.encode()), *HEADERS]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = _Writer(send, self._headers)
        try:
            await guarded(receive, self._pump(writer), timeout=self._timeout)
        except ClientDisconnected:
            # Raised again so that the log shows it; the error handlers answer nobody.
            scope["state"]["record"].error = "client disconnected"
            if not writer.started:
                raise
            return
        except Exception as error:
            if not writer.started:
                raise
            failure = as_api_error(error)
            scope["state"]["record"].error = failure.message
            await writer.write(self._failed(failure))
        await writer.finish(self._end)

    async def _pump(self, writer: _Writer) -> None:
        alive = asyncio.create_task(self._stay_alive(writer))
        try:
            async with aclosing(self._events) as events:
                async for each in events:
                    await writer.write(self._encode(each))
        finally:
            alive.cancel()

    async def _stay_alive(self, writer: _Writer) -> None:
        while self._keep_alive:
            silence = writer.now() - writer.last_write
            if silence >= self._keep_alive:
                await writer.write(KEEP_ALIVE)
                silence = 0.0
            await asyncio.sleep(self._keep_alive - silence)


class _Writer:
    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self.now = asyncio.get_running_loop().time
        self.last_write = self.now()
        self.started = False

    async def write(self, data: bytes) -> None:
        self.last_write = self.now()
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, end: bytes) -> None:
        await self.write(end)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
