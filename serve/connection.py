"""One HTTP connection, with bounds on what a client may send before a route sees it, and on how long it may take."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from llmjax.config import ServerConfig
from llmjax.serve.errors import ApiError

log = logging.getLogger("serve")

FIELD_OVERHEAD = 4  # ": " and the end of the line
MOST_PIPELINED = 16  # requests behind one that is being answered; hardly any client sends even one
# Of a body that was answered before its end; a client that is cut off while it sends does not see the answer.
MOST_DISCARDED = 32 * 2**20
GRACE_SECONDS = 1.0  # a new connection is not closed for others before its client could send


class IdleConnections:
    """Connections without a request, longest idle first; the first of too many are closed.

    Args:
        limit: how many are kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._since: dict[BoundedConnection, float] = {}

    def add(self, connection: BoundedConnection) -> None:
        now = connection.loop.time()
        self._since[connection] = now
        while len(self._since) > self._limit:
            oldest, since = next(iter(self._since.items()))
            if now - since < GRACE_SECONDS:
                return
            del self._since[oldest]
            oldest.transport.close()

    def discard(self, connection: BoundedConnection) -> None:
        self._since.pop(connection, None)


class BoundedConnection(HttpToolsProtocol):
    """Uvicorn's connection, which takes headers of any size and number at any pace, with limits on them.

    Args:
        settings: the limits.
        idle: the server's idle connections.
        uvicorn: what uvicorn gives to its protocols.
    """

    def __init__(self, *, settings: ServerConfig, idle: IdleConnections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._settings = settings
        self._idle = idle
        self._deadline: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._receiving = False  # some of a request has come, and not yet all
        self._in_head = True  # what comes next belongs to a request line or a header
        self._head_bytes = 0
        self._head_count = 0
        self._discarded = 0  # bytes of a body that nobody will read
        self._unparsed = 0  # bytes, at most, of which the parser has told nothing yet

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle.add(self)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._idle.discard(self)
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unparsed += len(data)
        super().data_received(data)
        if self._head_bytes + self._unparsed > self._settings.max_header_bytes and not self.transport.is_closing():
            self._refuse(_too_large(self._settings))

    # What the parser tells. An exception here ends the parsing and comes out at `send_400_response`.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._receiving = self._in_head = True
        self._head_bytes = self._head_count = self._unparsed = self._discarded = 0
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_count += 1
        self._count(len(name) + len(value) + FIELD_OVERHEAD)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        self._in_head = False
        self._stop_timer()
        self._idle.discard(self)
        super().on_headers_complete()
        if len(self.pipeline) > MOST_PIPELINED:
            raise ValueError("too many pipelined requests")

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > MOST_DISCARDED:
                self.transport.close()

    def on_message_complete(self) -> None:
        self._unparsed = self._head_bytes = 0
        self._receiving, self._in_head = False, True
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._receiving:
            # A body that no route has read may arrive to its end, but not forever.
            self._start_timer()
        elif self.cycle.response_complete:
            self._idle.add(self)

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or ApiError("this is not an HTTP request", code="invalid_http"))

    def _count(self, size: int) -> None:
        self._unparsed = 0
        self._head_bytes += size
        limits = self._settings
        if self._head_bytes > limits.max_header_bytes or self._head_count > limits.max_header_count:
            self._refusal = _too_large(limits)
            raise ValueError("headers too large")

    def _start_timer(self) -> None:
        self._stop_timer()
        self._deadline = self.loop.call_later(self._settings.read_timeout, self._late)

    def _stop_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        if self._receiving and self._in_head:
            seconds = self._settings.read_timeout
            error = f"the request's headers did not arrive within {seconds:g} s"
            self._refuse(ApiError(error, status=408, code="request_timeout"))
        else:  # it never sent anything, or has its answer
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answers in the application's place, unless another answer is on its way, and closes."""
        log.info("%s: %s", self.client[0] if self.client else "a client", error.message)
        if self.cycle is None or self.cycle.response_complete:
            body = orjson.dumps(error.body())
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def _too_large(settings: ServerConfig) -> ApiError:
    return ApiError(
        f"the request's headers are larger than {settings.max_header_bytes} bytes or more than "
        f"{settings.max_header_count}",
        status=431,
        code="headers_too_large",
    )
