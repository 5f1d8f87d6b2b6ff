"""Downloads of files that requests name, from hosts that the operator allows."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from threading import Timer
from urllib.parse import SplitResult, urlsplit

from llmjax.errors import InvalidRequest

PORTS = {"http": 80, "https": 443}
CHUNK = 64 * 2**10


@dataclass(frozen=True, kw_only=True)
class DownloadRules:
    """What may be downloaded.

    Attributes:
        hosts: names of hosts, as URLs have them.
        private: whether addresses of private networks and of this machine are allowed.
        seconds: time for all of it.
    """

    hosts: frozenset[str]
    private: bool = False
    seconds: float = 10.0


def download(url: str, rules: DownloadRules, *, most: int) -> bytes:
    """The content of a URL. The host's name is resolved once, and redirects are not followed. Blocks.

    Args:
        most: bytes at most.

    Raises:
        InvalidRequest: the host is not allowed, or the file cannot be had; the reason in one line.
    """
    deadline = time.monotonic() + rules.seconds
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or PORTS[parts.scheme.lower()]
    except (ValueError, KeyError):
        raise InvalidRequest("the URL is malformed") from None
    if host not in rules.hosts or parts.username is not None or parts.password is not None:
        raise InvalidRequest("images of this host are not downloaded (--allowed-media-domains)")
    address = _address(host, port, private=rules.private)
    connection = _Pinned(parts.scheme.lower(), host, port, address, deadline=deadline)
    watchdog = Timer(rules.seconds, connection.abandon)  # a host may send a byte now and then
    watchdog.daemon = True
    watchdog.start()
    try:
        connection.request("GET", _target(parts), headers={"Accept": "image/*", "User-Agent": "llmjax"})
        connection.limit()
        answer = connection.getresponse()
        if answer.status != 200:
            raise InvalidRequest(f"its host answers {answer.status}; redirects are not followed")
        data = bytearray()
        while len(data) <= most:
            connection.limit()
            if not (piece := answer.read1(CHUNK)):
                connection.limit()
                return bytes(data)
            data += piece
    except InvalidRequest:
        raise
    except TimeoutError:
        raise InvalidRequest(f"the download took more than {rules.seconds:g} s") from None
    except (OSError, http.client.HTTPException, ValueError):
        late = time.monotonic() >= deadline
        raise InvalidRequest(
            f"the download took more than {rules.seconds:g} s" if late else "it cannot be downloaded"
        ) from None
    finally:
        watchdog.cancel()
        connection.close()
    raise InvalidRequest(f"the file has more than {most >> 20} MiB")


def _target(parts: SplitResult) -> str:
    path = parts.path or "/"
    return f"{path}?{parts.query}" if parts.query else path


def _address(host: str, port: int, *, private: bool) -> str:
    """The first address of a host that may be asked; all of them must be allowed."""
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        found = []
    if not found:
        raise InvalidRequest("its host is not known")
    if not private and not all(_is_public(address) for address in found):
        raise InvalidRequest("its host has a private address")
    return found[0]


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_global and not (mapped or address).is_multicast


class _Pinned(http.client.HTTPConnection):
    """A connection to an address that has been resolved before, until a deadline."""

    def __init__(self, scheme: str, host: str, port: int, address: str, *, deadline: float) -> None:
        super().__init__(host, port)
        self._secure = scheme == "https"
        self._address = address
        self._deadline = deadline
        self._kept: socket.socket | None = None  # `sock` is None once an answer has it

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), timeout=self._left)
        self._kept = self.sock
        if self._secure:
            self.sock = self._kept = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)

    def limit(self) -> None:
        """Gives what follows the time that is left."""
        left = self._left
        if self._kept is not None and self._kept.fileno() >= 0:  # otherwise all is there
            self._kept.settimeout(left)

    def abandon(self) -> None:
        """Ends whatever another thread is waiting for."""
        if (connection := self._kept) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def _left(self) -> float:
        if (left := self._deadline - time.monotonic()) <= 0:
            raise TimeoutError
        return left
