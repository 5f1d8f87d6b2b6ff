"""Joining a group: rank 0 listens, other ranks connect, and both sides prove that they know the secret."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec

from llmjax.config import EngineConfig
from llmjax.engine.clients.wire import Channel
from llmjax.engine.device.commands import ProgramName, Values
from llmjax.engine.ranks.group import StartedRanks
from llmjax.engine.ranks.settings import difference, shared_settings
from llmjax.engine.ranks.strangers import Strangers
from llmjax.engine.ranks.wire import Challenge, Holds, Join, Loaded, Met, Refused, ToRankZero
from llmjax.errors import ConfigError

logger = logging.getLogger(__name__)

NONCE_BYTES = 32
FIRST_BYTES = 2**16  # limit of a message from a process that has not proved anything
FIRST_SECONDS = 10.0  # how long such a process may take for its whole first message
MOST_STRANGERS = 64  # such processes at once
WAITING = 64  # connections that wait to be accepted
RETRY_SECONDS = 0.2
CHECK_SECONDS = 0.5
MOST_REFUSALS = 4  # most refusals that an error lists
SILENCE = {  # after which the connection to a machine that went away without a word is broken; where systems know these
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 20_000,  # ms
}


@dataclass(eq=False)
class Peer:
    """Another rank, as rank 0 sees it.

    Attributes:
        where: its address.
        channel: the connection to it.
        messages: what it sends, until it ends.
        nonce: what rank 0 has to prove the secret with.
        machine: equal for all ranks on one machine.
        met, loaded, holds: done when the message of this name has come.
        compiled: done when it has a program, by the program's name.
        pages: done when it has read pages, by the number of the request.
        ended: set when its connection has ended.
    """

    rank: int
    where: str
    channel: Channel
    messages: Iterator[Any]
    nonce: bytes
    machine: str
    met: Future[Met] = field(default_factory=Future)
    loaded: Future[Loaded] = field(default_factory=Future)
    holds: Future[Holds] = field(default_factory=Future)
    compiled: dict[ProgramName, Future[None]] = field(default_factory=dict)
    pages: dict[int, Future[list[Values]]] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def awaited(self) -> list[Future[Any]]:
        """Every answer for which a thread may wait."""
        return [self.met, self.loaded, self.holds, *self.compiled.values(), *self.pages.values()]

    @property
    def name(self) -> str:
        """The rank's name in messages."""
        return f"rank {self.rank} ({self.where})"

    def refuse(self, reason: str) -> None:
        """Refuses the rank."""
        with suppress(OSError):  # it has gone by itself
            self.channel.send(Refused(reason))
        self.channel.end()


class Gathering:
    """Rank 0's wait for the other ranks.

    Args:
        config: settings of rank 0, which those of the others must fit.
        local: the other ranks, if this process has started them.
    """

    def __init__(self, config: EngineConfig, local: StartedRanks | None) -> None:
        self._config = config
        self._local = local
        self._settings = shared_settings(config)
        self._coming = threading.Condition()  # guards the fields below
        self._came: dict[int, Peer] = {}
        self._refusals: list[str] = []
        self._misfit: str | None = None

    def peers(self, listener: socket.socket) -> list[Peer]:
        """Waits for all other ranks, and returns them in order.

        Raises:
            ConfigError: one does not come in time, or does not fit.
        """
        config = self._config
        deadline = time.monotonic() + config.distributed_timeout_seconds
        logger.info("rank 0 waits for %d others at %s:%d", config.nnodes - 1, config.master_addr, config.master_port)
        strangers = Strangers(MOST_STRANGERS)
        threading.Thread(target=self._accept, args=(listener, strangers), name="group-accept", daemon=True).start()
        try:
            with self._coming:
                while len(self._came) < config.nnodes - 1 and self._misfit is None:
                    if self._local is not None:
                        self._local.check()
                    if (left := deadline - time.monotonic()) <= 0:
                        self._end(self._late())
                    self._coming.wait(min(left, CHECK_SECONDS))
                if self._misfit is not None:
                    self._end(self._misfit)
                return [self._came[rank] for rank in sorted(self._came)]
        finally:
            with suppress(OSError):  # if this does not wake the thread that accepts, it stays until the process ends
                listener.shutdown(socket.SHUT_RDWR)

    def _end(self, reason: str) -> NoReturn:
        for peer in self._came.values():
            peer.refuse(reason)
        raise ConfigError(reason)

    def _late(self) -> str:
        missing = ", ".join(str(rank) for rank in range(1, self._config.nnodes) if rank not in self._came)
        refused = f"; refused: {'; '.join(self._refusals)}" if self._refusals else ""
        return f"rank {missing} did not come within {self._config.distributed_timeout_seconds:g} s{refused}"

    def _accept(self, listener: socket.socket, strangers: Strangers) -> None:
        with suppress(OSError):  # the listener is closed when all are there
            while True:
                connection, address = listener.accept()
                strangers.add(connection)
                threading.Thread(
                    target=self._admit, args=(connection, address[0], strangers), name="group-admit", daemon=True
                ).start()

    def _admit(self, connection: socket.socket, where: str, strangers: Strangers) -> None:
        """Receives the first message of a process that has connected, and checks its proof."""
        channel = Channel(connection, ToRankZero, limit=FIRST_BYTES, seconds=FIRST_SECONDS)
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            configure(connection)
            channel.send(Challenge(nonce))
            messages = channel.receive()
            join = next(messages, None)
            if not isinstance(join, Join):
                raise msgspec.DecodeError("it does not say who it is")
            if not hmac.compare_digest(join.proof, proof(self._config, nonce, by="follower")):
                channel.send(Refused("the master_secret of this rank is not that of rank 0"))
                raise msgspec.DecodeError("it does not know the master_secret")
            strangers.remove(connection)
            remove_time_limits(channel)
            self._enlist(Peer(join.rank, where, channel, messages, join.nonce, join.machine), join)
        except (OSError, msgspec.MsgspecError) as error:
            with self._coming:
                self._refusals = [*self._refusals[-MOST_REFUSALS:], f"a process at {where}: {error}"]
            strangers.remove(connection)
            connection.close()

    def _enlist(self, peer: Peer, join: Join) -> None:
        """Takes in a process that knows the secret, or refuses it; one that does not fit ends the whole group."""
        with self._coming:
            misfit: str | None = None
            if (there := self._came.get(peer.rank)) is not None:
                why: str | None = f"there is already a rank {peer.rank}, at {there.where}"
            elif not 0 < peer.rank < self._config.nnodes:
                why = misfit = f"{peer.name} is not one of the {self._config.nnodes} ranks (nnodes)"
            else:
                why = misfit = difference(self._settings, join.settings, peer.name)
            if why is None:
                self._came[peer.rank] = peer
            else:  # before this process can end
                peer.refuse(why)
            self._misfit = self._misfit or misfit
            self._coming.notify()


def listen(config: EngineConfig) -> socket.socket:
    """Opens the port where the other ranks find rank 0.

    Rank 0 may start before its own name is known, or while the name still leads to the machine that had it before. It
    waits for that, as other ranks do.

    Raises:
        ConfigError: the address is not this machine's, or the port is taken.
    """
    where = f"master_addr {config.master_addr}, master_port {config.master_port}"
    deadline = time.monotonic() + config.distributed_timeout_seconds
    warned = False
    while True:
        try:
            family, *_, address = socket.getaddrinfo(config.master_addr, config.master_port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family, backlog=WAITING)
        except OSError as error:
            why = error.strerror or error
            if not _may_change(config.master_addr, error) or time.monotonic() > deadline:
                raise ConfigError(
                    f"{where}: rank 0 cannot listen there ({why}); it must be an address of its machine and a free port"
                ) from error
            if not warned:
                logger.warning("%s: %s; trying for %g s", where, why, config.distributed_timeout_seconds)
                warned = True
            time.sleep(RETRY_SECONDS)


def connect(config: EngineConfig) -> socket.socket:
    """Connects to rank 0, which may start later than this rank.

    Raises:
        ConfigError: it cannot be reached in time.
    """
    deadline = time.monotonic() + config.distributed_timeout_seconds
    while True:
        try:
            connection = socket.create_connection((config.master_addr, config.master_port), timeout=FIRST_SECONDS)
        except OSError as error:  # rank 0 may come yet, and so may its name
            if time.monotonic() > deadline:
                where = f"rank 0 at {config.master_addr}:{config.master_port}"
                raise ConfigError(f"rank {config.node_rank} does not reach {where}: {error}") from error
            time.sleep(RETRY_SECONDS)
        else:
            configure(connection)
            return connection


def _may_change(address: str, error: OSError) -> bool:
    """Whether a name may soon lead to another address."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
    return False


def free_port(address: str) -> int:
    """A port that is free now, for a process that will listen later."""
    family, *_, found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.create_server(found[:2], family=family) as probe:
        return int(probe.getsockname()[1])


def proof(config: EngineConfig, nonce: bytes, *, by: str) -> bytes:
    """A proof that its sender knows the secret.

    Args:
        nonce: random bytes that the other side has sent.
        by: ``leader`` or ``follower``, so that neither can send back the other's proof.
    """
    return hmac.digest((config.master_secret or "").encode(), by.encode() + nonce, "sha256")


def configure(connection: socket.socket) -> None:
    """Has small messages leave at once, and a machine noticed that is not there any more."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in SILENCE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def remove_time_limits(channel: Channel) -> None:
    """Removes the time limits of messages, so that several threads may send."""
    channel.seconds = None
    channel.connection.settimeout(None)
