"""Downloads of pictures: allowed hosts, addresses, redirects and slow hosts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from llmjax.errors import InvalidRequest
from llmjax.serve import downloads
from llmjax.serve.downloads import DownloadRules, download

MOST = 2**20


class Host(BaseHTTPRequestHandler):
    """A host with a picture, a redirect to it, and a path that is never finished."""

    def do_GET(self) -> None:
        if self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            while not self.server.over.wait(0.1):  # type: ignore[attr-defined]
                try:
                    self.wfile.write(b"x")
                except OSError:
                    return
            return
        if self.path == "/large":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(bytes(MOST + 1))
            return
        self.send_response(302 if self.path == "/moved" else 200 if self.path == "/a.png?b=1" else 404)
        self.send_header("Location", "/a.png?b=1")
        self.end_headers()
        self.wfile.write(b"picture")

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def serving() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    server.over = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server.server_address[1]
    server.over.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving() as port:
        yield port


LOCAL = DownloadRules(hosts=frozenset({"localhost", "127.0.0.1"}), private=True, seconds=30)


def test_a_picture_of_an_allowed_host(port: int) -> None:
    assert download(f"http://127.0.0.1:{port}/a.png?b=1", LOCAL, most=MOST) == b"picture"


@pytest.mark.parametrize(
    "path,reason",
    [
        ("/moved", "its host answers 302; redirects are not followed"),
        ("/no", "its host answers 404"),
        ("/large", "1 MiB"),
    ],
)
def test_what_the_host_says_instead(port: int, path: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        download(f"http://127.0.0.1:{port}{path}", LOCAL, most=MOST)


def test_a_slow_host_is_given_up(port: int) -> None:
    rules = DownloadRules(hosts=LOCAL.hosts, private=True, seconds=0.5)
    with pytest.raises(InvalidRequest, match=r"the download took more than 0.5 s"):
        download(f"http://127.0.0.1:{port}/slow", rules, most=MOST)


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/a.png",
        "http://localhost@other.example/",
        "http://user@localhost/",
        "http://localhost.evil/",
    ],
)
def test_other_hosts_are_not_asked(url: str) -> None:
    with pytest.raises(InvalidRequest, match="--allowed-media-domains"):
        download(url, LOCAL, most=MOST)


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], ["10.1.2.3"], ["169.254.169.254"], ["::1"], ["::ffff:127.0.0.1"], ["8.8.8.8", "192.168.0.1"], []],
)
def test_private_addresses_are_not_asked(addresses: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(0, 0, 0, "", (address, 80)) for address in addresses]
    monkeypatch.setattr(downloads.socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(downloads.socket, "create_connection", _never)
    with pytest.raises(InvalidRequest, match="private address" if addresses else "not known"):
        download("http://pictures.example/a.png", DownloadRules(hosts=frozenset({"pictures.example"})), most=MOST)


def _never(*_: object, **__: object) -> None:
    raise AssertionError("a host was asked")


def test_a_host_is_resolved_once(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that changes after the check reaches nobody."""
    answers: Iterator[str] = iter(["127.0.0.1"])
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(downloads.socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (next(answers), port))])
    monkeypatch.setattr(downloads, "_is_public", lambda address: True)
    rules = DownloadRules(hosts=frozenset({"pictures.example"}), seconds=30)
    monkeypatch.setattr(
        downloads.socket, "create_connection", lambda address, timeout: _connected(address, timeout, asked)
    )
    assert download(f"http://pictures.example:{port}/a.png?b=1", rules, most=MOST) == b"picture"
    assert asked == [("127.0.0.1", port)]


def _connected(address: tuple[str, int], timeout: float, asked: list[tuple[str, int]]) -> socket.socket:
    asked.append(address)
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.settimeout(timeout)
    connection.connect(address)
    return connection


@pytest.mark.parametrize("url", ["http://[::1", "http://localhost:port/", "https://"])
def test_malformed_urls(url: str) -> None:
    with pytest.raises(InvalidRequest):
        download(url, LOCAL, most=MOST)
