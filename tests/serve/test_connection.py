"""What a client may send before a route sees it, and how long it may take: raw bytes against a real server."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from llmjax.config import EngineConfig, ServerConfig
from llmjax.serve.body import MIN_BYTES_PER_SECOND
from llmjax.serve.connection import BoundedConnection, IdleConnections
from llmjax.serve.sse import EventStream
from tests.virtual_time import VirtualLoop

HEADERS = b"Host: localhost\r\nContent-Type: application/json\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HEADERS
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
PROMPT = b'{"prompt": [40, 41], "max_tokens": 1}'
# Seconds on the clock of the server's event loop, which tests put forward: no test takes as many.
READ_TIMEOUT = 600.0
GRACE = 300.0

Connect = Callable[[], socket.socket]


class Received:
    """How many bytes of each connection, by its client's port, the server has taken."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self._changed = threading.Condition()

    def note(self, port: int, count: int) -> None:
        with self._changed:
            self._bytes[port] = self._bytes.get(port, 0) + count
            self._changed.notify_all()

    def wait(self, sock: socket.socket, count: int) -> None:
        port = sock.getsockname()[1]
        with self._changed:
            self._changed.wait_for(lambda: self._bytes.get(port, -1) >= count)


@dataclass(frozen=True)
class Strict:
    """A server with limits that a test reaches."""

    url: httpx.URL
    loop: VirtualLoop
    received: Received

    def later(self, sock: socket.socket, count: int, seconds: float) -> None:
        """A number of seconds after all ``count`` bytes of a connection have come."""
        self.received.wait(sock, count)
        self.loop.put_forward(seconds)


@pytest.fixture(scope="module")
def strict(start_server: Callable[..., Any], engine_config: EngineConfig) -> Iterator[Strict]:
    limits = ServerConfig(
        port=0,
        max_header_bytes=2000,
        max_header_count=20,
        read_timeout=READ_TIMEOUT,
        keep_alive_timeout=100 * READ_TIMEOUT,
        max_idle_connections=3,
    )
    received = Received()

    class Watched(BoundedConnection):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._port = transport.get_extra_info("peername")[1]
            received.note(self._port, 0)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            received.note(self._port, len(data))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmjax.serve.server.BoundedConnection", Watched)
        patch.setattr("llmjax.serve.connection.GRACE_SECONDS", GRACE)
        server, stop = start_server(engine_config, limits, loop=VirtualLoop)
        yield Strict(httpx.URL(server.url), server.loop, received)
        stop()


@pytest.fixture
def connect(strict: Strict) -> Connect:
    return lambda: socket.create_connection((strict.url.host, strict.url.port or 0))


def everything(sock: socket.socket) -> bytes:
    """What comes until the server closes."""
    received = b""
    with suppress(ConnectionResetError):  # closed while more was on its way
        while data := sock.recv(2**16):
            received += data
    return received


def ask_version(sock: socket.socket, request: bytes = GET) -> None:
    sock.sendall(request)
    received = b""
    while not received.endswith(b"}"):
        data = sock.recv(2**16)
        assert data, "closed"
        received += data
    assert received.startswith(b"HTTP/1.1 200")


def send(sock: socket.socket, data: bytes) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # refused before its end
        sock.sendall(data)


def check_refused(answer: bytes, status: int, code: str) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert error["code"] == code and error["type"] == "invalid_request_error" and error["message"]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /version HTTP/1.1\r\nX-Long: " + b"a" * 10**6 + b"\r\n\r\n",
        b"GET /version HTTP/1.1\r\nX-Long: " + b"a" * 10**6,  # unfinished
        b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\n\r\n",
        b"GET /" + b"a" * 3000,
        b"GET /version HTTP/1.1\r\n" + b"a: b\r\n" * 21 + b"\r\n",
        b"GET /version HTTP/1.1\r\n"
        + b"aaaaaaa: "
        + b"b" * 300
        + b"\r\n"
        + (b"c: " + b"d" * 300 + b"\r\n") * 6
        + b"\r\n",
        b"\r\n" * 3000,
    ],
    ids=["one", "unfinished", "path", "unfinished path", "many", "sum", "empty lines"],
)
def test_too_large_headers(connect: Connect, request_bytes: bytes) -> None:
    with connect() as sock:
        send(sock, request_bytes)
        check_refused(everything(sock), 431, "headers_too_large")


def test_headers_within_their_limits_pass_in_any_pieces(connect: Connect) -> None:
    request = b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + b"a: bbbb\r\n" * 19 + b"\r\n"
    with connect() as sock:
        for _ in range(3):  # counted anew for each request
            for start in range(0, len(request) - 17, 17):
                sock.sendall(request[start : start + 17])
            ask_version(sock, request[start + 17 :])


@pytest.mark.parametrize("part", [b"X-Trailer: " + b"a" * 10**6, b"a: b\r\n" * 30], ids=["long", "many"])
def test_trailers_count_as_headers(connect: Connect, part: bytes) -> None:
    with connect() as sock:
        chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(PROMPT) + PROMPT + b"\r\n0\r\n"
        send(sock, chunked + part)
        assert b" 200 " not in everything(sock)[:20]


def test_late_headers(strict: Strict, connect: Connect) -> None:
    with connect() as sock:
        start = b"GET /version HTTP/1.1\r\nHost: local"
        sock.sendall(start)
        strict.later(sock, len(start), READ_TIMEOUT / 2)
        sock.sendall(b"h")  # which does not give it more time
        strict.later(sock, len(start) + 1, READ_TIMEOUT / 2)
        check_refused(everything(sock), 408, "request_timeout")
    with connect() as sock:  # after a complete one
        two = GET + b"GET /vers"
        sock.sendall(two)
        strict.later(sock, len(two), READ_TIMEOUT)
        answer = everything(sock)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 408" in answer


def test_late_body(strict: Strict, connect: Connect) -> None:
    with connect() as sock:
        start = POST + b"Content-Length: 100\r\n\r\n{"
        sock.sendall(start)
        strict.later(sock, len(start), READ_TIMEOUT + 1)
        check_refused(everything(sock), 408, "request_timeout")


@pytest.mark.parametrize("enough", [True, False])
def test_a_body_has_more_time_the_longer_it_is(strict: Strict, connect: Connect, enough: bool) -> None:
    """What comes at the least pace is waited for, though it takes longer than the limit."""
    piece = b" " * (200 * MIN_BYTES_PER_SECOND)  # 200 s more
    head = POST + b"Content-Length: %d\r\n\r\n" % (len(piece) + len(PROMPT))
    with connect() as sock:
        sock.sendall(head + piece)
        strict.later(sock, len(head + piece), READ_TIMEOUT + (100 if enough else 200))
        if enough:
            sock.sendall(PROMPT)
            assert sock.recv(2**16).startswith(b"HTTP/1.1 200")
        else:
            check_refused(everything(sock), 408, "request_timeout")


def test_a_body_that_nobody_reads_does_not_hold_the_connection(strict: Strict, connect: Connect) -> None:
    with connect() as sock:
        sock.sendall(b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert sock.recv(2**16).startswith(b"HTTP/1.1 404")
        strict.loop.put_forward(READ_TIMEOUT)
        everything(sock)  # it is closed


def test_silent_connections_are_closed(strict: Strict, connect: Connect) -> None:
    with connect() as sock:
        strict.later(sock, 0, READ_TIMEOUT)
        assert everything(sock) == b""


def test_idle_connections_are_few(strict: Strict, connect: Connect) -> None:
    """With more than three, those that have been idle longest are closed, but none before its client could send."""

    def asked() -> socket.socket:
        sock = connect()
        ask_version(sock)
        return sock

    socks = [asked() for _ in range(5)]
    for sock in socks:  # all of them are new
        ask_version(sock)
    strict.loop.put_forward(GRACE)
    socks.append(asked())
    assert [sock.recv(1) for sock in socks[:3]] == [b"", b"", b""]
    for sock in socks[3:]:
        ask_version(sock)
    for sock in socks:
        sock.close()


def test_pipelined_requests_are_answered(connect: Connect) -> None:
    with connect() as sock:
        sock.sendall(GET * 100)
        answer = b""
        while answer.count(b"HTTP/1.1 200") < 100:
            answer += sock.recv(2**16)


def test_what_is_not_http_gets_the_same_error_body(connect: Connect) -> None:
    with connect() as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
        check_refused(everything(sock), 400, "invalid_http")


def test_a_large_body_does_not_keep_its_sender_from_the_answer(running: Any) -> None:
    """The refusal comes at once, and a client that only reads once it has sent everything still gets it."""
    url = httpx.URL(running.url)  # with more patience than the strict server has
    with closing(socket.create_connection((url.host, url.port or 0))) as sock:
        size = 20 * 2**20
        sock.sendall(POST + b"Content-Length: %d\r\n\r\n" % size)
        assert sock.recv(12) == b"HTTP/1.1 413"
        sock.sendall(b" " * size)
    headers = {"content-type": "application/json"}
    response = httpx.post(url.join("/v1/completions"), content=b" " * size, headers=headers, timeout=None)
    assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"


class Pipe(asyncio.Transport):
    """What a client has not taken yet, and whether it was cut off."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 6)})
        self.waiting = 0
        self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


class Timers:
    """A loop's timers, which run when they are told to."""

    def __init__(self) -> None:
        self.set: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return 0.0

    def call_later(self, seconds: float, work: Callable[[], None]) -> Any:
        self.set.append((seconds, work))
        entry = self.set[-1]
        return SimpleNamespace(cancel=lambda: self.set.remove(entry) if entry in self.set else None)

    def due(self, seconds: float) -> None:
        """Runs the one timer of this many seconds."""
        (entry,) = [entry for entry in self.set if entry[0] == seconds]
        self.set.remove(entry)
        entry[1]()


def connection_of(app: Any, loop: Any, **settings: Any) -> BoundedConnection:
    """A connection to an application, as the server makes it."""
    config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None, access_log=False)
    config.load()
    made = ServerConfig(**settings)
    return BoundedConnection(
        settings=made, idle=IdleConnections(9), config=config, server_state=ServerState(), app_state={}, _loop=loop
    )


@pytest.mark.parametrize(
    ("left", "cut"),
    [
        ([100_000], True),  # nothing was taken
        ([90_001], True),  # less than 1000 bytes a second
        ([90_000, 90_000], True),
        ([90_000, 80_000, 70_000], False),
        ([90_000, 95_000], True),
    ],
)
def test_a_client_has_to_take_what_it_is_sent(left: list[int], cut: bool) -> None:
    timers, pipe = Timers(), Pipe()
    connection = connection_of(None, timers, send_timeout=10.0)
    connection.connection_made(pipe)
    pipe.waiting = 100_000
    connection.pause_writing()
    for waiting in left:
        assert not pipe.aborted
        pipe.waiting = waiting
        timers.due(10.0)
    assert pipe.aborted is cut
    connection.resume_writing()
    assert [seconds for seconds, _ in timers.set if seconds == 10.0] == []


def test_a_stream_that_nobody_reads_ends() -> None:
    """Its events are closed, and so is the connection, although the client stays."""

    async def main() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            try:
                while True:
                    yield b"data: " + b"x" * 2**16 + b"\n\n"
                    await asyncio.sleep(0)  # as an engine is waited for
            finally:
                ended.set()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope.setdefault("state", {})["record"] = SimpleNamespace(error=None)
            await EventStream(events(), keep_alive=0, timeout=None)(scope, receive, send)

        server = await loop.create_server(lambda: connection_of(app, loop, send_timeout=0.05), "127.0.0.1", 0)
        async with server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=1)
            writer.write(GET)
            async with asyncio.timeout(60):
                await ended.wait()
            writer.close()

    asyncio.run(main())
