"""What a client may send before a route sees it, and how long it may take: raw bytes against a real server."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import httpx
import pytest

from llmjax.config import EngineConfig, ServerConfig

pytestmark = pytest.mark.once  # what is asked of the engine, other tests ask with every JAX

HEADERS = b"Host: localhost\r\nContent-Type: application/json\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HEADERS
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
PROMPT = b'{"prompt": [40, 41], "max_tokens": 1}'

Connect = Callable[[], socket.socket]


@pytest.fixture(scope="module")
def strict(
    start_server: Callable[[EngineConfig, ServerConfig], Any], engine_config: EngineConfig
) -> Iterator[httpx.URL]:
    """A server with limits that a test reaches."""
    limits = ServerConfig(
        port=0,
        max_header_bytes=2000,
        max_header_count=20,
        read_timeout=0.5,
        keep_alive_timeout=60,
        max_idle_connections=3,
    )
    server, stop = start_server(engine_config, limits)
    yield httpx.URL(server.url)
    stop()


@pytest.fixture
def connect(strict: httpx.URL) -> Connect:
    def make() -> socket.socket:
        sock = socket.create_connection((strict.host, strict.port or 0))
        sock.settimeout(30)
        return sock

    return make


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


def test_late_headers(connect: Connect) -> None:
    with connect() as sock:
        sock.sendall(b"GET /version HTTP/1.1\r\nHost: local")
        check_refused(everything(sock), 408, "request_timeout")
    with connect() as sock:  # behind a complete one
        sock.sendall(GET + b"GET /vers")
        answer = everything(sock)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 408" in answer


def test_late_body(connect: Connect) -> None:
    with connect() as sock:
        sock.sendall(POST + b"Content-Length: 100\r\n\r\n{")
        check_refused(everything(sock), 408, "request_timeout")


def test_a_body_has_more_time_the_longer_it_is(connect: Connect) -> None:
    """A tenth of a second a kilobyte is faster than the least pace: no timeout, though it takes longer than one."""
    body = b'{"prompt": [40, 41], "max_tokens": 1' + b" " * 12_000 + b"}"
    with connect() as sock:
        sock.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 1000):
            sock.sendall(body[start : start + 1000])
            time.sleep(0.1)
        assert sock.recv(2**16).startswith(b"HTTP/1.1 200")


def test_a_body_that_nobody_reads_does_not_hold_the_connection(connect: Connect) -> None:
    with connect() as sock:
        sock.sendall(b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert everything(sock).startswith(b"HTTP/1.1 404")


def test_silent_connections_are_closed(connect: Connect) -> None:
    with connect() as sock:
        assert everything(sock) == b""


def test_idle_connections_are_few(connect: Connect) -> None:
    """Of more than three the ones that have been idle longest are closed, but none within its first second."""
    socks = []
    for _ in range(3):
        sock = connect()
        ask_version(sock)
        socks.append(sock)
    time.sleep(1.1)
    for _ in range(2):
        sock = connect()
        ask_version(sock)
        socks.append(sock)
    assert [sock.recv(1) for sock in socks[:2]] == [b"", b""]
    for sock in socks[2:]:
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
    response = httpx.post(
        url.join("/v1/completions"), content=b" " * size, headers={"content-type": "application/json"}
    )
    assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
