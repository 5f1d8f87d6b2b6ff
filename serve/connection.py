"""One HTTP connection, with bounds on what a client may send before a route sees it, and on how long it may take."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from llmjax.config import ServerConfig
from llmjax.serve.body import MIN_BYTES_PER_SECOND
from llmjax.serve.errors import ApiError
from llmjax.serve.lingering import HeldFlow, LingeringTransport

log = logging.getLogger("serve")

FIELD_OVERHEAD = 4  # ": " and the end of the line
MOST_PIPELINED = 16  # requests parsed while one is answered; what follows them waits unparsed
PIECE_BYTES = 16 * 1024  # parsed in one go: it may hold some hundred requests
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

    transport: LingeringTransport
    flow: HeldFlow

    def __init__(self, *, settings: ServerConfig, idle: IdleConnections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._settings = settings
        self._idle = idle
        self._deadline: asyncio.TimerHandle | None = None
        self._waiting = memoryview(b"")  # what has come and is not parsed yet
        self._answered: RequestResponseCycle | None = None  # the request whose turn it is, or was last
        self._fault: ApiError | None = None  # that a callback of the parser has found
        self._refusal: ApiError | None = None  # of the last request, once those before it have their answers
        self._unread: asyncio.TimerHandle | None = None  # running while the client takes nothing, or too little
        self._receiving = False  # some of a request has come, and not yet all
        self._in_head = True  # what comes next belongs to a request line or a header
        self._head_bytes = 0
        self._head_count = 0
        self._unparsed = 0  # bytes, at most, of which the parser has told nothing yet

    @property
    def _busy(self) -> bool:
        """Whether an answer is on its way."""
        return self._answered is not None and not self._answered.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        lingering = LingeringTransport(
            transport,
            sending=lambda: self._receiving or self._refusal is not None,
            seconds=self._settings.read_timeout,
        )
        super().connection_made(lingering)
        self.flow = HeldFlow(lingering)
        self._idle.add(self)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._answered is not None and self._busy:  # of several requests, uvicorn tells the last one
            self._leave(self._answered)
        self.pipeline.clear()
        self.transport.stop()
        self._idle.discard(self)
        self._stop_timer()
        self._taken()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taken()

    def _taken(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _watch_sending(self) -> None:
        """Cuts the client off unless it soon takes some of what waits for it: an answer is made, and kept, whether it
        is read or not."""
        waiting, seconds = self.transport.get_write_buffer_size(), self._settings.send_timeout

        def check() -> None:
            if self.transport.get_write_buffer_size() + MIN_BYTES_PER_SECOND * seconds <= waiting:
                self._watch_sending()
                return
            client = self.client[0] if self.client else "a client"
            log.info("%s: the client did not read what it was sent within %g s", client, seconds)
            self.transport.abort()  # closing would wait for it

        self._unread = self.loop.call_later(seconds, check)

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.lingers:
            self.transport.stop()

    def data_received(self, data: bytes) -> None:
        if self.transport.lingers:
            self.transport.discard(len(data))
        elif not self.transport.is_closing() and self._refusal is None:
            self._waiting = memoryview(bytes(self._waiting) + data if self._waiting else data)
            self._parse()

    def _parse(self) -> None:
        """What has come, as long as few requests wait for their turn."""
        self._unset_keepalive_if_required()
        while self._waiting and len(self.pipeline) < MOST_PIPELINED and not self.transport.is_closing():
            piece, self._waiting = self._waiting[:PIECE_BYTES], self._waiting[PIECE_BYTES:]
            try:
                self._feed(piece)
            except httptools.HttpParserError:
                fault = self._fault or ApiError("this is not an HTTP request", code="invalid_http")
                self._refuse(fault)
                return
            if self._head_bytes + self._unparsed > self._settings.max_header_bytes:
                self._refuse(_too_large(self._settings))
                return
        self.flow.hold(bool(self._waiting))

    def _feed(self, data: bytes | memoryview) -> None:
        while data:
            self._unparsed += len(data)
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                # The parser leaves a request that offers another protocol at its head, though a server that does not
                # take up the offer answers it as if there were none (RFC 9110, 7.8).
                data = self._head_without_offer() + bytes(data[offer.args[0] :])
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _head_without_offer(self) -> bytes:
        """The head that has just been parsed."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    # What the parser tells. An exception here ends the parsing.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._receiving = self._in_head = True
        self._head_bytes = self._head_count = self._unparsed = self.transport.discarded = 0
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
        if (fault := self._fault_of_head()) is not None:
            self._fault = fault
            raise ValueError(fault.message)
        if self.parser.should_upgrade():
            return
        self._in_head = False
        self._stop_timer()
        self._idle.discard(self)
        super().on_headers_complete()

    def _fault_of_head(self) -> ApiError | None:
        """What RFC 9112 has a server refuse, and the parser lets pass."""
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            return ApiError("a request must have one `Host` header", code="invalid_http")
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            return ApiError("the only known Transfer-Encoding is chunked", code="invalid_http")
        if self.parser.get_method() == b"CONNECT":
            return ApiError("this is not a proxy", code="invalid_http")
        return None

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)
        if self.cycle.response_complete:
            self.transport.discard(len(body))

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._unparsed = self._head_bytes = 0
        self._receiving, self._in_head = False, True
        self._stop_timer()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._waiting and not self.transport.is_closing():
            self._parse()
        if self._busy or self.transport.is_closing():
            return
        if self._refusal is not None:
            self._say(self._refusal)
        elif self._receiving and not self._in_head:
            # A body that no route has read may arrive to its end, but not forever.
            self._start_timer()
        elif not self._receiving:
            self._idle.add(self)

    def _count(self, size: int) -> None:
        self._unparsed = 0
        self._head_bytes += size
        limits = self._settings
        if self._head_bytes > limits.max_header_bytes or self._head_count > limits.max_header_count:
            self._fault = _too_large(limits)
            raise ValueError("headers too large")

    def _start_timer(self) -> None:
        self._stop_timer()
        self._deadline = self.loop.call_later(self._settings.read_timeout, self._late)

    def _stop_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        if self.flow.read_paused:  # it is not the client's fault
            self._start_timer()
        elif self._receiving and self._in_head:
            seconds = self._settings.read_timeout
            error = f"the request's headers did not arrive within {seconds:g} s"
            self._refuse(ApiError(error, status=408, code="request_timeout"))
        else:  # it never sent anything, or has its answer
            self.transport.stop()

    def _refuse(self, error: ApiError) -> None:
        """Answers the next request in place of the application, once those before it are answered, and closes."""
        log.info("%s: %s", self.client[0] if self.client else "a client", error.message)
        self._refusal = error
        self._waiting = memoryview(b"")
        self._stop_timer()
        if self._receiving and not self._in_head:
            if self.cycle is not self._answered:
                self.pipeline.popleft()  # it was the last to come
            elif self.cycle.response_started:
                self.transport.close()
                return
            else:
                self._leave(self.cycle)
                self._answered = None
        if not self._busy:
            self._say(error)

    def _say(self, error: ApiError) -> None:
        body = orjson.dumps(error.body())
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    @staticmethod
    def _leave(cycle: RequestResponseCycle) -> None:
        """Has the application see a client that has gone."""
        cycle.disconnected = True
        cycle.message_event.set()


def _too_large(settings: ServerConfig) -> ApiError:
    return ApiError(
        f"the request's headers are larger than {settings.max_header_bytes} bytes or more than "
        f"{settings.max_header_count}",
        status=431,
        code="headers_too_large",
    )
