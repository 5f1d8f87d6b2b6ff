"""KV transfer from server to server over TCP: one gives away the pages of finished prompts, and another takes them.

Both sides prove that they know the same secret before they mention pages; nothing is encrypted.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from llmjax.engine.clients.wire import Channel, Message
from llmjax.engine.core.page_pool import PageKey
from llmjax.engine.core.tier import Contents, KeptPage, PageName
from llmjax.engine.ranks.strangers import Strangers
from llmjax.engine.tiers.disk_thread import DiskThread
from llmjax.engine.tiers.host import PageFormat
from llmjax.engine.tiers.offload import PagesLost
from llmjax.errors import ConfigError
from llmjax.kv_transfer import SETTING, KVTransferConfig, address_of

logger = logging.getLogger(__name__)

NONCE_BYTES = 16
FIRST_BYTES = 4096  # most bytes of a message from a process that has not proved that it knows the secret
MORE_BYTES = 4096  # bytes of a message with a page, besides the page
GIVEN_SECONDS = 120.0  # how long pages wait to be taken
CONNECT_SECONDS = 5.0  # time limit for reaching a server, and for each message
MOST_TAKERS = 32  # at once
MOST_STRANGERS = 64  # connections that have not proved yet that they may take pages


class Hello(Message, tag="hello"):
    """The giver's first message."""

    nonce: bytes


class Take(Message, tag="take"):
    """The taker's request for pages.

    Args:
        nonce: the giver has to prove the secret with it.
        proof: proves that the taker knows the secret.
        identity: digest of what decides the content of pages.
        name: name of the pages.
    """

    nonce: bytes
    proof: bytes
    identity: str
    name: str


class Given(Message, tag="given"):
    """The giver's answer: ``count`` pages follow.

    Args:
        proof: proves that the giver knows the secret.
    """

    proof: bytes
    count: int


class Page(Message, tag="page"):
    """One of the pages that a giver sends."""

    group: int
    digest: bytes
    payload: bytes


class NotGiven(Message, tag="not_given"):
    """The giver's last message, if it gives no pages."""

    reason: str


@dataclass
class _Gift:
    """The pages of a prompt."""

    parts: list[tuple[int, list[PageKey], Contents]]  # by group, as they are read out
    num_bytes: int
    since: float = field(default_factory=time.monotonic)
    pages: list[tuple[PageName, KeptPage]] = field(default_factory=list)
    there: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        """Waits for the device and copies the pages to the host, so that they take no memory on the device."""
        for group, keys, contents in self.parts:
            for key, content in zip(keys, contents.contents(), strict=True):
                self.pages.append(((group, key.digest), KeptPage(key.tokens, content)))
        self.parts.clear()
        self.there.set()


def bind(config: KVTransferConfig) -> socket.socket:
    """Binds the address where pages will be given, so that no other process takes it while a model is loaded.

    Raises:
        ConfigError: the address cannot be used.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in config.kv_ip else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # otherwise a server could not be restarted at once
        bound.bind((config.kv_ip, config.kv_port))
    except OSError as error:
        bound.close()
        raise _unusable(config, error) from error
    return bound


def _unusable(config: KVTransferConfig, error: OSError) -> ConfigError:
    return ConfigError(f"{SETTING}: {config.kv_ip}:{config.kv_port}: {error.strerror or error}")


class PageGiver:
    """Gives pages away at its own address.

    Args:
        config: the address, and how many bytes may wait.
        bound: the socket that ``bind`` has made; it is closed with the giver.
        identity: digest of what decides the content of pages.
        secret: the secret that takers must know.
        formats: formats of pages, by group.
        seconds: how long pages wait to be taken.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(
        self,
        config: KVTransferConfig,
        bound: socket.socket,
        *,
        identity: str,
        secret: str,
        formats: Sequence[PageFormat],
        seconds: float = GIVEN_SECONDS,
    ) -> None:
        self._seconds = seconds
        self._limit = int(config.kv_buffer_size)
        self._identity = identity
        self._secret = secret
        self._formats = formats
        self._gifts: OrderedDict[str, _Gift] = OrderedDict()  # the oldest first
        self._closed = False
        self._changed = threading.Condition()  # guards the two fields above
        self._strangers = Strangers(MOST_STRANGERS)
        self._takers = threading.Semaphore(MOST_TAKERS)
        self._reader = DiskThread("kv-given")
        self._socket = bound
        try:
            bound.listen()
        except OSError as error:
            raise _unusable(config, error) from error
        for name, work in (("kv-giver", self._accept), ("kv-given-up", self._give_up)):
            threading.Thread(target=work, name=name, daemon=True).start()

    @property
    def waiting(self) -> int:
        """Prompts whose pages wait to be taken."""
        return len(self._gifts)

    def give(self, name: str, parts: list[tuple[int, list[PageKey], Contents]]) -> None:
        """Lets other servers take pages for some time; the oldest are dropped when there are too many."""
        size = sum(self._formats[group].num_bytes * len(keys) for group, keys, _ in parts)
        if size > self._limit:
            logger.warning("%s: kv_buffer_size has no room for the %d bytes of a prompt", SETTING, size)
            return
        gift = _Gift(parts, size)
        with self._changed:
            self._gifts[name] = gift
            total = sum(other.num_bytes for other in self._gifts.values())
            while total > self._limit:
                total -= self._gifts.popitem(last=False)[1].num_bytes
            self._changed.notify_all()
        self._reader.add(gift.read)

    def _give_up(self) -> None:
        """Drops pages that nobody takes in time, whether or not new ones come."""
        with self._changed:
            while not self._closed:
                oldest = next(iter(self._gifts), None)
                left = None if oldest is None else self._gifts[oldest].since + self._seconds - time.monotonic()
                if oldest is not None and left is not None and left <= 0:
                    del self._gifts[oldest]
                    self._changed.notify_all()
                else:
                    self._changed.wait(left)

    def close(self) -> None:
        """Stops giving pages."""
        with self._changed:
            self._closed = True
            self._gifts.clear()
            self._changed.notify_all()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for connections
        self._socket.close()
        self._reader.close(0.0)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # it is closed
                return
            self._strangers.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="kv-taker", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._hear(Channel(connection, Take, limit=FIRST_BYTES, seconds=CONNECT_SECONDS))
        except (OSError, msgspec.MsgspecError) as error:
            logger.debug("pages are not taken: %s", error)
        finally:
            self._strangers.remove(connection)

    def _hear(self, channel: Channel) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        channel.send(Hello(nonce))
        take = next(channel.receive(), None)
        if take is None:
            return
        if not hmac.compare_digest(take.proof, _proof(self._secret, nonce, by="taker")):
            channel.send(NotGiven("it has another master_secret"))
            return
        self._strangers.remove(channel.connection)
        if not self._takers.acquire(blocking=False):
            channel.send(NotGiven("it gives pages to too many others"))
            return
        try:
            self._answer(channel, take)
        finally:
            self._takers.release()

    def _answer(self, channel: Channel, take: Take) -> None:
        """Gives pages to one that knows the secret."""
        if take.identity != self._identity:
            channel.send(NotGiven("it has another model, other types or another page size"))
            return
        with self._changed:
            gift = self._gifts.get(take.name)
        if gift is None or not gift.there.wait(CONNECT_SECONDS):
            channel.send(NotGiven("the pages are not there (any more)"))
            return
        channel.send(Given(_proof(self._secret, take.nonce, by="giver"), len(gift.pages)))
        for (group, digest), page in gift.pages:
            channel.send(Page(group, digest, self._formats[group].encode(page)))
        with self._changed:  # all of them have left
            self._gifts.pop(take.name, None)


class PageTaker:
    """Takes pages from other servers.

    Args:
        peers: the servers, each ``host:port``; nothing connects elsewhere.
        identity: digest of what decides the content of pages.
        secret: the secret that givers must know.
        formats: formats of pages, by group.
    """

    def __init__(self, peers: Sequence[str], *, identity: str, secret: str, formats: Sequence[PageFormat]) -> None:
        self._addresses = {peer: address_of(peer) for peer in peers}
        self._identity = identity
        self._secret = secret
        self._formats = formats

    def take(self, name: str, *, peer: str) -> Iterator[tuple[PageName, KeptPage]]:
        """Yields the pages that one of the servers has under a name.

        Raises:
            PagesLost: they do not come, or not all of them; the message says why.
        """
        if peer not in self._addresses:
            raise PagesLost(f"{peer} is not one of kv_peers")
        try:
            with socket.create_connection(self._addresses[peer], timeout=CONNECT_SECONDS) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                said = Hello | Given | Page | NotGiven
                yield from self._taken(Channel(connection, said, limit=FIRST_BYTES, seconds=CONNECT_SECONDS), name)
        except (OSError, msgspec.MsgspecError) as error:
            raise PagesLost(f"{peer}: {error}") from error

    def _taken(self, channel: Channel, name: str) -> Iterator[tuple[PageName, KeptPage]]:
        messages = channel.receive()
        hello = _next(messages, Hello)
        nonce = secrets.token_bytes(NONCE_BYTES)
        channel.send(Take(nonce, _proof(self._secret, hello.nonce, by="taker"), self._identity, name))
        given = _next(messages, Given)
        if not hmac.compare_digest(given.proof, _proof(self._secret, nonce, by="giver")):
            raise msgspec.DecodeError("it has another master_secret")
        channel.limit = max(form.num_bytes for form in self._formats) + MORE_BYTES
        for _ in range(given.count):
            page = _next(messages, Page)
            if not 0 <= page.group < len(self._formats):
                raise msgspec.DecodeError(f"there is no group {page.group} of layers")
            try:
                yield (page.group, page.digest), self._formats[page.group].decode(page.payload)
            except ValueError as error:
                raise msgspec.DecodeError(str(error)) from error


def _next(messages: Iterator[Any], kind: Any) -> Any:
    message = next(messages, None)
    if isinstance(message, NotGiven):
        raise msgspec.DecodeError(message.reason)
    if not isinstance(message, kind):
        raise msgspec.DecodeError("the connection was cut" if message is None else "it does not answer as it should")
    return message


def _proof(secret: str, nonce: bytes, *, by: str) -> bytes:
    """Proves that the side ``by`` knows the secret. The proof names the side, so the other one cannot reuse it."""
    return hmac.digest(secret.encode(), f"kv pages, {by}: ".encode() + nonce, "sha256")
