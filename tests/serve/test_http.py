"""HTTP/1.1 as RFC 9112 has it: raw bytes against a connection that serves a small application."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, cast

import pytest
import uvicorn

from llmjax.config import ServerConfig
from llmjax.serve.connection import BoundedConnection, IdleConnections
from llmjax.serve.lingering import MOST_DISCARDED

HEAD = b"POST /%d HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"


class Application:
    """Answers with the path and what it has read; ``/hold…`` only once ``go`` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.begun = threading.Semaphore(0)
        self.left = threading.Semaphore(0)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path: str = scope["path"]
        body, more = b"", not path.startswith("/refuse")
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.release()
                return
            body += message["body"]
            more = message["more_body"]
        if path.startswith("/hold"):
            self.begun.release()
            gone = asyncio.ensure_future(receive())
            await asyncio.wait({gone, asyncio.ensure_future(self.go.wait())}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self.left.release()
                return
            gone.cancel()
        answer = path.encode() + b" " + body
        headers = [(b"content-length", str(len(answer)).encode())]
        if path.startswith("/refuse"):
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Application, int, asyncio.AbstractEventLoop]]:
    settings = ServerConfig(port=0, read_timeout=30, keep_alive_timeout=60)
    listening = socket.create_server(("127.0.0.1", 0))
    started: list[Any] = []
    ready = threading.Event()

    async def main() -> None:
        application = Application()
        connection = partial(BoundedConnection, settings=settings, idle=IdleConnections(100))
        config = uvicorn.Config(
            application,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            http=cast(type[asyncio.Protocol], connection),
        )
        server = uvicorn.Server(config)
        started.extend([application, server, asyncio.get_running_loop()])
        ready.set()
        await server.serve(sockets=[listening])

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert ready.wait(60)
    application, server, loop = started
    yield application, listening.getsockname()[1], loop
    server.should_exit = True
    thread.join(60)


@pytest.fixture
def connect(served: Any) -> Iterator[Callable[[], socket.socket]]:
    made: list[socket.socket] = []

    def make() -> socket.socket:
        made.append(socket.create_connection(("127.0.0.1", served[1])))
        made[-1].settimeout(60)
        return made[-1]

    yield make
    for sock in made:
        sock.close()


def answers(sock: socket.socket, count: int) -> list[tuple[int, bytes]]:
    """Status and body of the next answers."""
    data, found = b"", []
    while len(found) < count:
        head, end, rest = data.partition(b"\r\n\r\n")
        size = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0)
        if end and len(rest) >= size:
            found.append((int(head[9:12]), rest[:size]))
            data = rest[size:]
            continue
        more = sock.recv(2**16)
        assert more, (found, data)
        data += more
    assert data == b""
    return found


def check_bad(answer: tuple[int, bytes], words: str = "") -> None:
    status, body = answer
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (400, "invalid_http") and words in error["message"]


@pytest.mark.parametrize("pieces", [1, 2, 50])
@pytest.mark.parametrize("chunked", [False, True])
def test_an_offer_of_another_protocol_is_not_taken_up(
    connect: Callable[[], socket.socket], pieces: int, chunked: bool
) -> None:
    """Java's client sends it with its first request; the request and those after it are answered as any."""
    body = CHUNKED + b"5\r\nhello\r\n0\r\n\r\n" if chunked else b"Content-Length: 5\r\n\r\nhello"
    stream = HEAD % 1 + OFFER + body + HEAD % 2 + body + HEAD % 3 + OFFER + b"\r\n" + HEAD % 4 + OFFER + body
    sock = connect()
    size = -(-len(stream) // pieces)
    for at in range(0, len(stream), size):
        sock.sendall(stream[at : at + size])
    assert answers(sock, 4) == [(200, b"/1 hello"), (200, b"/2 hello"), (200, b"/3 "), (200, b"/4 hello")]


@pytest.mark.parametrize("count", [100, 3000])
def test_pipelined_requests_are_answered_in_order(connect: Callable[[], socket.socket], count: int) -> None:
    sock = connect()
    bodies = [b"x" * (i % 7) for i in range(count)]
    stream = b"".join(HEAD % i + b"Content-Length: %d\r\n\r\n" % len(body) + body for i, body in enumerate(bodies))
    sender = threading.Thread(target=sock.sendall, args=(stream,))
    sender.start()
    assert answers(sock, count) == [(200, b"/%d " % i + body) for i, body in enumerate(bodies)]
    sender.join()
    sock.sendall(HEAD % 1 + b"\r\n")
    assert answers(sock, 1) == [(200, b"/1 ")]


def test_a_head_that_was_cut_behind_others_comes_to_its_end(connect: Callable[[], socket.socket]) -> None:
    sock = connect()
    stream = b"".join(HEAD % i + b"\r\n" for i in range(40))
    sock.sendall(stream + b"GET /last HT")
    assert [body for _, body in answers(sock, 40)] == [b"/%d " % i for i in range(40)]
    sock.sendall(b"TP/1.1\r\nHost: localhost\r\n\r\n")
    assert answers(sock, 1) == [(200, b"/last ")]


def test_all_of_a_connection_are_told_that_it_is_gone(served: Any, connect: Callable[[], socket.socket]) -> None:
    """Not only the last of them."""
    application = served[0]
    sock = connect()
    sock.sendall(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n" + HEAD % 2 + b"\r\n")
    assert application.begun.acquire()
    sock.close()
    assert application.left.acquire()


BAD = {
    "size of a chunk": (HEAD % 0 + CHUNKED + b"zz\r\nhello\r\n0\r\n\r\n", ""),
    "end of a chunk": (HEAD % 0 + CHUNKED + b"5\r\nhelloXX\r\n0\r\n\r\n", ""),
    "second chunk": (HEAD % 0 + CHUNKED + b"5\r\nhello\r\n-1\r\n", ""),
    "coding": (HEAD % 0 + b"Transfer-Encoding: gzip\r\n\r\nhello", "Transfer-Encoding"),
    "codings": (HEAD % 0 + b"Transfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", "Transfer-Encoding"),
    "identity": (HEAD % 0 + b"Transfer-Encoding: identity\r\n\r\nhello", "Transfer-Encoding"),
    "twice chunked": (HEAD % 0 + b"Transfer-Encoding: chunked, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", ""),
    "two lengths": (HEAD % 0 + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!", ""),
    "length and coding": (HEAD % 0 + b"Content-Length: 5\r\n" + CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", ""),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", "Host"),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", "Host"),
    "no host with an offer": (b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", "Host"),
    "proxy": (b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n", "proxy"),
    "TLS": (b"\x16\x03\x01\x02\x00 hello\r\n\r\n", ""),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", ""),
}


@pytest.mark.parametrize("behind", [0, 1, 30])
@pytest.mark.parametrize("pieces", [1, 30])
@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_a_400_behind_the_answers_before_it(
    connect: Callable[[], socket.socket], name: str, behind: int, pieces: int
) -> None:
    request, words = BAD[name]
    stream = b"".join(HEAD % i + b"\r\n" for i in range(behind)) + request + b"POST / HTTP/1.1" * 100
    sock = connect()
    size = -(-len(stream) // pieces)
    for at in range(0, len(stream), size):
        sock.sendall(stream[at : at + size])
    *good, bad = answers(sock, behind + 1)
    assert good == [(200, b"/%d " % i) for i in range(behind)]
    check_bad(bad, words)
    assert sock.recv(1) == b""  # and nothing else


def test_a_body_that_goes_wrong_behind_a_request_that_waits(served: Any, connect: Callable[[], socket.socket]) -> None:
    application, _, loop = served
    sock = connect()
    sock.sendall(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n" + HEAD % 2 + b"\r\n" + HEAD % 3 + CHUNKED + b"2\r\nab\r\n")
    assert application.begun.acquire()
    sock.sendall(b"wrong\r\n")
    loop.call_soon_threadsafe(application.go.set)
    try:
        held, second, bad = answers(sock, 3)
    finally:
        loop.call_soon_threadsafe(application.go.clear)
    assert (held, second) == ((200, b"/hold "), (200, b"/2 "))
    check_bad(bad)


def test_http_1_0_needs_no_host(connect: Callable[[], socket.socket]) -> None:
    sock = connect()
    sock.sendall(b"GET /1 HTTP/1.0\r\n\r\n")
    assert answers(sock, 1) == [(200, b"/1 ")]
    assert sock.recv(1) == b""


@pytest.mark.parametrize("framing", [b"Content-Length: 3000000\r\n\r\n", CHUNKED + b"%x\r\n" % 3_000_000])
def test_an_answer_before_the_body_is_seen_by_who_sends_all_of_it(
    connect: Callable[[], socket.socket], framing: bytes
) -> None:
    """The connection is closed for more requests, but not torn down under the client."""
    sock = connect()
    sock.sendall(b"POST /refuse HTTP/1.1\r\nHost: a\r\n" + framing)
    assert answers(sock, 1) == [(200, b"/refuse ")]
    for _ in range(30):
        sock.sendall(b"x" * 100_000)
    assert sock.recv(1) == b""


def test_who_sends_on_and_on_is_cut_off(connect: Callable[[], socket.socket]) -> None:
    sock = connect()
    sock.sendall(b"POST /refuse HTTP/1.1\r\nHost: a\r\nContent-Length: 10000000000\r\n\r\n")
    assert answers(sock, 1) == [(200, b"/refuse ")]
    with suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(2 * MOST_DISCARDED // 2**20):
            sock.sendall(b"x" * 2**20)
        raise AssertionError("all was taken")
