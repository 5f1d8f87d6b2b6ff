"""Server-sent events: one response class that streams, keeps idle connections open and ends cleanly."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from llmjax.serve.errors import ClientDisconnected, as_api_error
from llmjax.serve.generation import guarded

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
]


# Choices of one token, with what names its fields, are shorter than this.
OBFUSCATION_BLOCK = 128  # bytes


def event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def delta_event(chunk: dict[str, Any], *, obfuscate: bool) -> bytes:
    """A chunk of an answer as an event.

    Args:
        chunk: with its ``choices``.
        obfuscate: add random characters, as OpenAI does, so that an observer of the sizes of encrypted packets cannot
            tell from them how long each token is: choices and padding fill whole blocks.
    """
    if not obfuscate:
        return event(chunk)
    missing = -len(orjson.dumps(chunk["choices"])) % OBFUSCATION_BLOCK
    return event({**chunk, "obfuscation": secrets.token_urlsafe(missing)[:missing]})


class EventStream:
    """An ASGI response that sends ``events`` as they come.

    Nothing is sent before the first event or the first keep-alive, so an error before it still has its HTTP status;
    a later one becomes an error event. The events are closed as soon as the client goes away.

    Args:
        events: complete server-sent events, without the final ``[DONE]``.
        keep_alive: seconds of silence after which a comment is sent; 0: never.
        timeout: seconds the whole stream may take, or None.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], *, keep_alive: float, timeout: float | None) -> None:
        self._events = events
        self._keep_alive = keep_alive
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = _Writer(send)
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
            await writer.write(event(failure.body()))
        await writer.finish()

    async def _pump(self, writer: _Writer) -> None:
        alive = asyncio.create_task(self._stay_alive(writer))
        try:
            async with aclosing(self._events) as events:
                async for chunk in events:
                    await writer.write(chunk)
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
    def __init__(self, send: Send) -> None:
        self._send = send
        self.now = asyncio.get_running_loop().time
        self.last_write = self.now()
        self.started = False

    async def write(self, data: bytes) -> None:
        self.last_write = self.now()
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        await self.write(DONE)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
