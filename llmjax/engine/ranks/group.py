"""Several processes that run one model: how they find each other, what they agree on, and how the leader tells the
others what it runs.

Rank 0 leads: it has the requests, plans the steps and says to the others which programs it compiles and runs, with the
arrays that it hands them. The others follow (``follower``). The devices exchange values among themselves, within the
programs (JAX's collectives).
"""

from __future__ import annotations

import dataclasses
import errno
import hmac
import ipaddress
import itertools
import logging
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from queue import SimpleQueue
from typing import Any, NoReturn, Protocol, TypeVar

import jax
import msgspec
import numpy.typing as npt
from jax._src import distributed, xla_bridge  # where gloo listens can be said nowhere else
from jaxlib import _jax  # type: ignore[attr-defined]  # it has no types

from llmjax import host_memory
from llmjax.config import EngineConfig
from llmjax.engine.clients.wire import Channel, Failed, Leave, Message
from llmjax.engine.device.batch import Bucket
from llmjax.engine.ranks.lifeline import Lifeline
from llmjax.engine.ranks.strangers import Strangers
from llmjax.engine.ranks.wire import (
    Agreed,
    Alive,
    Challenge,
    Compile,
    Compiled,
    Hidden,
    Holds,
    Join,
    Loaded,
    Meet,
    Met,
    Pages,
    PageShape,
    Program,
    ReadPages,
    Refused,
    ToFollower,
    ToLeader,
    Welcome,
    WritePages,
)
from llmjax.errors import ConfigError, EngineDead, LLMJaxError
from llmjax.kernels.cpu import shared_sum
from llmjax.version import __version__

logger = logging.getLogger(__name__)

T = TypeVar("T")

NONCE_BYTES = 32
FIRST_BYTES = 2**16  # of a message of somebody who has not proved anything
FIRST_SECONDS = 10.0  # that such a one may take for all of it
MOST_STRANGERS = 64  # of such ones at once
WAITING = 64  # connections that wait to be heard
RETRY_SECONDS = 0.2
CHECK_SECONDS = 0.5
MOST_REFUSALS = 4  # that an error tells of
LEAVE_SECONDS = 2.0  # that the others get to end by themselves
CAUSE_SECONDS = 5.0  # at most, from a failed exchange between devices to the end of the other process's connection
PULSE_SECONDS = 10.0  # between a process's signs of life
SILENT_SECONDS = 120  # without one, after which a process that is still connected counts as gone
SHUTDOWN_SECONDS = 5
HEARTBEAT_SECONDS = 30  # without a sign of a process, after which JAX's coordinator holds it for dead
SILENCE = {  # after which the connection to a machine that has gone without a word is broken; where systems know these
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 20_000,  # ms
}

# What ranks may have each for itself; all other settings decide programs.
OWN_SETTINGS = frozenset(
    {
        "model",
        "tokenizer",
        "skip_tokenizer_init",
        "hf_token",
        "download_dir",
        "offline",
        "chat_template",
        "generation_config",
        "override_generation_config",
        "quantization_param_path",
        "seed",
        "scheduling_policy",
        "max_num_queued_reqs",
        "kv_cache_memory_bytes",
        "device_ids",
        "node_rank",
        "master_addr",
        "master_port",
        "master_secret",
        "distributed_timeout_seconds",
        "multi_process",
        "threads",
        "cpu_list",
        "numa",
        "compilation_cache_dir",
        "packed_weights_bytes",
        "compile_threads",
        "engine_process",
        "served_model_name",
        "disable_log_stats",
    }
)


class StartedRanks(Protocol):
    """Other ranks that this process has started."""

    def check(self) -> None:
        """Raises ConfigError if one of them has ended."""

    def end(self) -> object:
        """Waits for them a little, and ends them."""

    def kill(self, rank: int) -> None:
        """Ends one that hangs."""


class Alone:
    """The process of an engine that has no others; what the engine needs of a group."""

    size = 1
    neighbors = 1  # ranks on this machine, itself included

    def meet(self) -> None:
        """Makes JAX see the devices of all ranks; before it has opened any."""

    def shares_memory(self, devices: int) -> bool:
        """Whether all ranks are on this machine, and from now on their devices can add up in memory.

        Args:
            devices: of all ranks.
        """
        return False

    def agree(self, model: str, pages: list[int]) -> list[int]:
        """Compares what the ranks have loaded.

        Args:
            model: a digest of it.
            pages: of each group of layers, that there is room for here.

        Returns:
            How many there is room for on every rank.

        Raises:
            ConfigError: the ranks have loaded different models.
        """
        return pages

    def everywhere(self, kind: str, bucket: Bucket, compile: Callable[[], T]) -> T:
        """What ``compile`` makes, when every rank has made it."""
        return compile()

    def tell(self, message: Message) -> None:
        """Has the others do what this process is about to do."""

    def hidden(self) -> bytes:
        """What the stage before the last one has made of the tokens of the next step; waits for it.

        Raises:
            EngineDead: a stage has gone.
        """
        raise NotImplementedError("there is one stage")

    def page_shapes(self, group: int) -> list[PageShape]:
        """What the other ranks have of a page of a group of layers, in their order."""
        return []

    def read_pages(self, group: int, pages: Sequence[int]) -> list[Future[list[bytes]]]:
        """What each of the other ranks has of some pages, as ``Pages`` says it, when all that it was told has run."""
        return []

    def write_pages(self, group: int, pages: Sequence[int], arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Gives the other ranks their parts of other content for pages.

        Args:
            arrays: as `page_shapes` has them, [pages, layers, …].
        """

    def end_with_process(self) -> None:
        """Has the others hear at once when this process is killed."""

    def watch(self, lost: Callable[[LLMJaxError], None]) -> None:
        """Has ``lost`` called, on another thread, when a rank has gone."""

    def cause(self, error: Exception) -> Exception:
        """What an error of a step comes from: that a rank has gone is said by who lost its connection first."""
        return error

    def close(self) -> None:
        """Lets the others go."""


def group_of(config: EngineConfig, local: StartedRanks | None = None) -> Alone:
    """This process's side of the group that a configuration describes, once all ranks are there.

    Args:
        local: the other ranks, where this process has started them; the group ends them.

    Raises:
        ConfigError: a rank has not come, has other settings, or does not know the secret; the address is not this
            machine's or the port is taken.
    """
    if config.nnodes == 1:
        return Alone()
    return Leader(config, local) if config.node_rank == 0 else Follower(config)


def shared_settings(config: EngineConfig) -> dict[str, str]:
    """What all ranks must have alike: versions, and settings that decide programs."""
    fields = dataclasses.fields(config)
    settings = {field.name: repr(getattr(config, field.name)) for field in fields if field.name not in OWN_SETTINGS}
    versions = {name: version(name) for name in ("jax", "jaxlib")}
    return {"llmjax": __version__, **versions, **settings}


@dataclasses.dataclass(eq=False)
class _Member:
    """A follower, as the leader sees it."""

    rank: int
    where: str
    channel: Channel
    messages: Iterator[Any]
    nonce: bytes
    machine: str
    met: Future[Met] = dataclasses.field(default_factory=Future)
    loaded: Future[Loaded] = dataclasses.field(default_factory=Future)
    holds: Future[Holds] = dataclasses.field(default_factory=Future)
    pages: dict[int, Future[list[bytes]]] = dataclasses.field(default_factory=dict)  # that are being read, by number
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)  # or its connection has

    @property
    def waited_for(self) -> list[Future[Any]]:
        """What somebody may wait for it to say."""
        return [self.met, self.loaded, self.holds, *self.pages.values()]

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.where})"


class Several(Alone):
    """A side of a group of several processes, which hears at once when another one has gone.

    Args:
        config: its own.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.size = config.nnodes
        self._config = config
        self._lock = threading.Lock()  # of what follows
        self._closed = False
        self._lost: LLMJaxError | None = None
        self._is_lost = threading.Event()
        self._watchers: list[Callable[[LLMJaxError], None]] = []
        self._lifeline: Lifeline | None = None

    @property
    def _channels(self) -> list[Channel]:
        """To the others."""
        raise NotImplementedError

    def end_with_process(self) -> None:
        self._lifeline = Lifeline([channel.connection for channel in self._channels])

    def watch(self, lost: Callable[[LLMJaxError], None]) -> None:
        with self._lock:
            self._watchers.append(lost)
            already = self._lost
        if already is not None:
            lost(already)

    def cause(self, error: Exception) -> Exception:
        if not isinstance(error, LLMJaxError):
            self._is_lost.wait(CAUSE_SECONDS)
        return self._lost or error

    def close(self) -> None:
        with self._lock:
            self._closed = True
        if self._lifeline is not None:
            self._lifeline.close()

    def unless_lost(self, wait: Callable[[], T]) -> T:
        """What a call makes that waits for the other ranks: JAX waits for one that has gone as long as for a late one.

        Args:
            wait: runs on another thread, where it may stay.

        Raises:
            EngineDead: a rank has gone meanwhile.
        """
        made: Future[T] = Future()

        def run() -> None:
            try:
                result = wait()
            except BaseException as error:
                with suppress(InvalidStateError):  # nobody waits any more
                    made.set_exception(error)
            else:
                with suppress(InvalidStateError):
                    made.set_result(result)

        def end(error: LLMJaxError) -> None:
            with suppress(InvalidStateError):  # it had been made
                made.set_exception(error)

        self.watch(end)
        threading.Thread(target=run, name="group-wait", daemon=True).start()
        return made.result()

    def _mind(self, channel: Channel) -> None:
        """Gives another process signs of life, and has who hears it raise BlockingIOError when it gives none."""
        silence = struct.pack("ll", SILENT_SECONDS, 0)
        channel.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, silence)

        def live() -> None:
            with suppress(OSError):  # it has ended
                while True:
                    time.sleep(PULSE_SECONDS)
                    channel.send(Alive())

        threading.Thread(target=live, name="group-pulse", daemon=True).start()

    def _first(self, error: LLMJaxError) -> bool:
        """Notes what the group has ended by; whether this has ended it."""
        with self._lock:
            if self._closed or self._lost is not None:
                return False
            self._lost = error
        self._is_lost.set()
        return True

    def _tell_watchers(self, error: LLMJaxError) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher(error)


class Leader(Several):
    """Rank 0.

    Args:
        config: its own; the others' must fit.
        local: as in ``group_of``.

    Raises:
        ConfigError: see ``group_of``.
    """

    def __init__(self, config: EngineConfig, local: StartedRanks | None) -> None:
        super().__init__(config)
        self._local = local
        self._settings = shared_settings(config)
        self._compiling: dict[tuple[int, Program], Future[None]] = {}  # under the lock
        self._hidden: SimpleQueue[bytes | None] = SimpleQueue()  # of the last rank but this; None: a rank has gone
        self._numbers = itertools.count()
        self._coming = threading.Condition()  # of what follows
        self._came: dict[int, _Member] = {}
        self._refusals: list[str] = []
        self._misfit: str | None = None
        with _listen(config) as listener:
            self._members = self._gather(listener)
        self._port = free_port(config.master_addr)
        machines = Counter([host_memory.machine(), *(member.machine for member in self._members)])
        self.neighbors = machines[host_memory.machine()]
        for member in self._members:
            member.channel.limit = 2**32 - 1
            proof = _proof(config, member.nonce, by="leader")
            member.channel.send(Welcome(proof, self._port, machines[member.machine]))
            self._mind(member.channel)
            threading.Thread(target=self._hear, args=(member,), name=f"rank-{member.rank}", daemon=True).start()

    @property
    def _channels(self) -> list[Channel]:
        return [member.channel for member in self._members]

    def meet(self) -> None:
        if not self._config.is_staged:  # stages share no program
            _initialize(self, self._config, rank=0, port=self._port, address=self._members[0].channel.address)

    def shares_memory(self, devices: int) -> bool:
        try:
            name = shared_sum.make(devices)
        except shared_sum.NotShared as error:
            name, why = "", f"rank 0: {error}"
        else:
            why = self._met(name, devices)
            shared_sum.unnamed(name)
        for member in self._members:
            member.channel.send(Meet("" if why else name, devices))
        if why:
            logger.info("ranks add up by way of the network, for they share no memory (%s)", why)
            return False
        self.watch(lambda lost: shared_sum.stop())
        return True

    def _met(self, name: str, devices: int) -> str:
        """Why a rank cannot use shared memory; empty: all can."""
        whys = []
        for member in self._members:
            member.channel.send(Meet(name, devices))
        try:
            shared_sum.attach(name, devices)
        except shared_sum.NotShared as error:
            whys.append(f"rank 0: {error}")
        whys += [f"{member.name}: {why}" for member in self._members if (why := member.met.result().why)]
        return whys[0] if whys else ""

    def agree(self, model: str, pages: list[int]) -> list[int]:
        least = pages
        for member in self._members:
            loaded = member.loaded.result()
            if loaded.model != model:
                self._refuse(
                    f"{member.name} has loaded another model than rank 0 (other weights, or the same in other types, "
                    "for their CPUs differ: set dtype)"
                )
            least = [min(*counts) for counts in zip(least, loaded.pages, strict=True)]
        for member in self._members:
            member.channel.send(Agreed(least))
        return least

    def everywhere(self, kind: str, bucket: Bucket, compile: Callable[[], T]) -> T:
        program = Program(kind, bucket)
        with self._lock:
            self._check()
            waiting = [self._compiling.setdefault((member.rank, program), Future()) for member in self._members]
        self._send(Compile(program))
        made = compile()
        for future in waiting:
            future.result()
        return made

    def tell(self, message: Message) -> None:
        with self._lock:
            self._check()
        self._send(message)

    def page_shapes(self, group: int) -> list[PageShape]:
        return [shape for member in self._members for shape in member.holds.result().groups[group]]

    def read_pages(self, group: int, pages: Sequence[int]) -> list[Future[list[bytes]]]:
        number = next(self._numbers)
        with self._lock:
            self._check()
            found = [member.pages.setdefault(number, Future()) for member in self._members]
        self._send(ReadPages(number, group, list(pages)))
        return found

    def write_pages(self, group: int, pages: Sequence[int], arrays: Sequence[npt.NDArray[Any]]) -> None:
        rest = iter(arrays)
        for member in self._members:
            own = [array.tobytes() for array in itertools.islice(rest, len(member.holds.result().groups[group]))]
            self._send_to(member, member.channel.encode(WritePages(group, list(pages), own)))

    def hidden(self) -> bytes:
        found = self._hidden.get()
        if found is None:
            self._hidden.put(None)  # for who asks again
            raise self._lost or EngineDead("the engine is closed")
        return found

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting: list[Future[Any]] = list(self._compiling.values())
            waiting += [future for member in self._members for future in member.pages.values()]
        super().close()
        self._hidden.put(None)
        for future in waiting:  # or threads that compile would wait for those that have left
            if not future.done():
                future.set_exception(EngineDead("the engine is closed"))
        for member in self._members:
            with suppress(OSError):  # it has gone already
                member.channel.send(Leave())
            member.channel.end()
        # JAX aborts those who find its coordinator, which is in this process, gone before they have ended.
        deadline = time.monotonic() + LEAVE_SECONDS
        for member in self._members:
            member.ended.wait(max(0.0, deadline - time.monotonic()))
        if self._local is not None:
            self._local.end()

    def _gather(self, listener: socket.socket) -> list[_Member]:
        """All followers, in the order of their ranks."""
        config = self._config
        deadline = time.monotonic() + config.distributed_timeout_seconds
        logger.info("rank 0 waits for %d others at %s:%d", self.size - 1, config.master_addr, config.master_port)
        strangers = Strangers(MOST_STRANGERS)
        threading.Thread(target=self._accept, args=(listener, strangers), name="group-accept", daemon=True).start()
        try:
            with self._coming:
                while len(self._came) < self.size - 1 and self._misfit is None:
                    if self._local is not None:
                        self._local.check()
                    if (left := deadline - time.monotonic()) <= 0:
                        self._refuse(self._late())
                    self._coming.wait(min(left, CHECK_SECONDS))
                if self._misfit is not None:
                    self._refuse(self._misfit)
                return [self._came[rank] for rank in sorted(self._came)]
        finally:
            with suppress(OSError):  # where it does not wake who accepts, that one stays until the process ends
                listener.shutdown(socket.SHUT_RDWR)

    def _late(self) -> str:
        missing = ", ".join(str(rank) for rank in range(1, self.size) if rank not in self._came)
        refused = f"; refused: {'; '.join(self._refusals)}" if self._refusals else ""
        return f"rank {missing} did not come within {self._config.distributed_timeout_seconds:g} s{refused}"

    def _accept(self, listener: socket.socket, strangers: Strangers) -> None:
        with suppress(OSError):  # it is closed when all are there
            while True:
                connection, address = listener.accept()
                strangers.add(connection)
                threading.Thread(
                    target=self._admit, args=(connection, address[0], strangers), name="group-admit", daemon=True
                ).start()

    def _admit(self, connection: socket.socket, where: str, strangers: Strangers) -> None:
        """Hears who has connected."""
        channel = Channel(connection, ToLeader, limit=FIRST_BYTES, seconds=FIRST_SECONDS)
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            _set_up(connection)
            channel.send(Challenge(nonce))
            messages = channel.receive()
            join = next(messages, None)
            if not isinstance(join, Join):
                raise msgspec.DecodeError("it does not say who it is")
            if not hmac.compare_digest(join.proof, _proof(self._config, nonce, by="follower")):
                channel.send(Refused("the master_secret of this rank is not that of rank 0"))
                raise msgspec.DecodeError("it does not know the master_secret")
            strangers.remove(connection)
            _unhurried(channel)
            self._enlist(_Member(join.rank, where, channel, messages, join.nonce, join.machine), join)
        except (OSError, msgspec.MsgspecError) as error:
            with self._coming:
                self._refusals = [*self._refusals[-MOST_REFUSALS:], f"a process at {where}: {error}"]
            strangers.remove(connection)
            connection.close()

    def _enlist(self, member: _Member, join: Join) -> None:
        """Makes one that knows the secret a rank, or says why not; one that does not fit ends the whole group."""
        with self._coming:
            misfit: str | None = None
            if (there := self._came.get(member.rank)) is not None:
                why: str | None = f"there is already a rank {member.rank}, at {there.where}"
            elif not 0 < member.rank < self.size:
                why = misfit = f"{member.name} is not one of the {self.size} ranks (nnodes)"
            else:
                why = misfit = _difference(self._settings, join.settings, member.name)
            if why is None:
                self._came[member.rank] = member
            else:  # before this process can end
                _refuse(member, why)
            self._misfit = self._misfit or misfit
            self._coming.notify()

    def _hear(self, member: _Member) -> None:
        """Takes what a follower says, until it ends."""
        error: LLMJaxError | None = None
        try:
            for message in member.messages:
                match message:
                    case Met():
                        member.met.set_result(message)
                    case Loaded():
                        member.loaded.set_result(message)
                    case Holds():
                        member.holds.set_result(message)
                    case Pages():
                        with self._lock:
                            pages = member.pages.pop(message.number)
                        pages.set_result(message.arrays)
                    case Hidden() if member.rank + 1 < self.size:
                        self._relay(self._members[member.rank], message)  # the next rank
                    case Hidden():
                        self._hidden.put(message.data)
                    case Compiled():
                        with self._lock:
                            future = self._compiling[member.rank, message.program]
                        if message.failure is None:
                            future.set_result(None)
                        else:
                            future.set_exception(message.failure.error())
                    case Alive():
                        pass
                    case Failed():
                        error = EngineDead(f"{member.name}: {message.failure.message}")
        except (OSError, msgspec.MsgspecError) as broken:
            error = error or _gone(member.name, broken)
            if isinstance(broken, BlockingIOError) and self._local is not None:
                self._local.kill(member.rank)
        member.ended.set()
        self._lose(member, error or _gone(member.name))

    def _relay(self, member: _Member, message: Message) -> None:
        try:
            member.channel.send(message)
        except OSError as error:
            self._lose(member, _gone(member.name, error))

    def _lose(self, member: _Member, error: LLMJaxError) -> None:
        if not self._first(error):
            return
        logger.error("%s", error)
        self._tell_watchers(error)  # before anything that may wait
        self._hidden.put(None)
        with self._lock:
            futures: list[Future[Any]] = list(self._compiling.values())
            futures += [future for other in self._members for future in other.waited_for]
        for future in futures:
            if not future.done():
                future.set_exception(error)
        for other in self._members:
            if other is not member:
                _refuse(other, str(error))

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _send(self, message: Message) -> None:
        encoded = self._members[0].channel.encode(message)
        for member in self._members:
            self._send_to(member, encoded)

    def _send_to(self, member: _Member, encoded: bytes) -> None:
        try:
            member.channel.send_encoded(encoded)
        except OSError as error:
            self._lose(member, _gone(member.name, error))
            raise self._lost or error from error

    def _refuse(self, reason: str) -> NoReturn:
        """Ends the group before it has begun."""
        with self._lock:
            self._closed = True
        for member in self._came.values():
            _refuse(member, reason)
        raise ConfigError(reason)


def _gone(name: str, error: Exception | None = None) -> EngineDead:
    """What the end of a connection means: how a process that ends is noticed depends on who notices it."""
    if isinstance(error, BlockingIOError):
        return EngineDead(f"{name} has given no sign of life for {SILENT_SECONDS} s")
    if error is None or isinstance(error, ConnectionError):
        return EngineDead(f"{name} has gone")
    return EngineDead(f"{name} cannot be reached: {error}")


def _refuse(member: _Member, reason: str) -> None:
    with suppress(OSError):  # it has gone by itself
        member.channel.send(Refused(reason))
    member.channel.end()


class Follower(Several):
    """Another rank.

    Args:
        config: its own, which must fit the leader's.

    Attributes:
        channel: to the leader.
        messages: of the leader, until it ends.

    Raises:
        ConfigError: see ``group_of``.
    """

    messages: Iterator[Any]

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._where = f"rank 0 at {config.master_addr}:{config.master_port}"
        connection = self._connect()
        self.channel = Channel(connection, ToFollower, seconds=FIRST_SECONDS)
        self.messages = coming = self.channel.receive()
        try:
            challenge = self._next(Challenge)
            nonce = secrets.token_bytes(NONCE_BYTES)
            proof = _proof(config, challenge.nonce, by="follower")
            self.channel.send(Join(config.node_rank, nonce, proof, shared_settings(config), host_memory.machine()))
            _unhurried(self.channel)
            welcome = self._next(Welcome)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{self._where} does not answer as one of llmjax does: {error}") from error
        if not hmac.compare_digest(welcome.proof, _proof(config, nonce, by="leader")):
            raise ConfigError(f"{self._where} does not know the master_secret of this rank")
        self._port = welcome.port
        self.neighbors = welcome.neighbors
        self._agreed = False  # from then on who is refused need not be told elsewhere
        heard: SimpleQueue[Any] = SimpleQueue()
        self.messages = iter(heard.get, None)
        self._mind(self.channel)
        threading.Thread(target=self._hear, args=(coming, heard), name="rank-0", daemon=True).start()

    @property
    def _channels(self) -> list[Channel]:
        return [self.channel]

    def meet(self) -> None:
        if not self._config.is_staged:
            rank = self._config.node_rank
            _initialize(self, self._config, rank=rank, port=self._port, address=self.channel.address)

    def shares_memory(self, devices: int) -> bool:
        offered, why = self._next(Meet), ""
        if not offered.name:
            return False
        try:
            shared_sum.attach(offered.name, offered.devices)
        except shared_sum.NotShared as error:
            why = str(error)
        self.channel.send(Met(why))
        return bool(self._next(Meet).name)

    def agree(self, model: str, pages: list[int]) -> list[int]:
        self.channel.send(Loaded(model, pages))
        agreed: list[int] = self._next(Agreed).pages
        self._agreed = True
        return agreed

    def _connect(self) -> socket.socket:
        """A connection to the leader, when it is there."""
        config = self._config
        deadline = time.monotonic() + config.distributed_timeout_seconds
        while True:
            try:
                connection = socket.create_connection((config.master_addr, config.master_port), timeout=FIRST_SECONDS)
            except OSError as error:  # it may come yet, and so may its name
                if time.monotonic() > deadline:
                    raise ConfigError(f"rank {config.node_rank} does not reach {self._where}: {error}") from error
                time.sleep(RETRY_SECONDS)
            else:
                _set_up(connection)
                return connection

    def _hear(self, coming: Iterator[Any], heard: SimpleQueue[Any]) -> None:
        """Takes what the leader says, whatever this process waits for: its end is known at once."""
        error: LLMJaxError = EngineDead("rank 0 has gone")
        try:
            for message in coming:
                if isinstance(message, Alive):
                    continue
                heard.put(message)
                if isinstance(message, Leave) or (isinstance(message, Refused) and not self._agreed):
                    heard.put(None)
                    return
                if isinstance(message, Refused):
                    error = EngineDead(message.reason)
                    break
        except (OSError, msgspec.MsgspecError) as broken:
            if not isinstance(broken, ConnectionError):
                error = _gone(self._where, broken)
        heard.put(None)
        if self._first(error):
            self._tell_watchers(error)

    def _next(self, kind: type[T]) -> Any:
        message = next(self.messages, None)
        if isinstance(message, kind):
            return message
        if isinstance(message, Refused):
            raise ConfigError(message.reason)
        raise ConfigError(f"{self._where} has gone")


def _listen(config: EngineConfig) -> socket.socket:
    """Where the others find rank 0. Its own name may come to be known later than it starts, and may lead to the machine
    that had it before: other ranks wait for it, and so does this one."""
    where = f"master_addr {config.master_addr}, master_port {config.master_port}"
    deadline = time.monotonic() + config.distributed_timeout_seconds
    told = False
    while True:
        try:
            family, *_, address = socket.getaddrinfo(config.master_addr, config.master_port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family, backlog=WAITING)
        except OSError as error:
            why = error.strerror or error
            if not _may_come(config.master_addr, error) or time.monotonic() > deadline:
                raise ConfigError(
                    f"{where}: rank 0 cannot listen there ({why}); it must be an address of its machine and a free port"
                ) from error
            if not told:
                logger.warning("%s: %s; trying for %g s", where, why, config.distributed_timeout_seconds)
                told = True
            time.sleep(RETRY_SECONDS)


def _may_come(address: str, error: OSError) -> bool:
    """Whether what a name leads to may be another address soon."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
    return False


def free_port(address: str) -> int:
    """A port for somebody who will listen later."""
    family, *_, found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.create_server(found[:2], family=family) as probe:
        return int(probe.getsockname()[1])


def _initialize(group: Several, config: EngineConfig, *, rank: int, port: int, address: str) -> None:
    """Connects JAX's processes.

    Args:
        group: whose end ends the waiting for them.
        port: of JAX's coordinator, at rank 0.
        address: of this process, where the others reach it.
    """
    host = f"[{config.master_addr}]" if ":" in config.master_addr else config.master_addr
    # Else a process that ends would have JAX abort the others before they could say so.
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM and says nothing
    initialize = partial(
        jax.distributed.initialize,
        coordinator_address=f"{host}:{port}",
        num_processes=config.nnodes,
        process_id=rank,
        initialization_timeout=int(config.distributed_timeout_seconds),
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        coordinator_bind_address=f"{host}:{port}" if rank == 0 and _is_loopback(config.master_addr) else None,
    )
    try:
        group.unless_lost(initialize)
    except RuntimeError as error:
        raise ConfigError(f"rank {rank} does not meet the others: {' '.join(str(error).split())}") from error

    def cpu_client() -> Any:
        # By itself gloo takes the address of the machine's name, which may have none, or one of another network.
        client = distributed.global_state.client
        gloo = _jax.make_gloo_tcp_collectives(distributed_client=client, hostname=address)
        return group.unless_lost(lambda: xla_bridge.make_cpu_client(gloo))

    xla_bridge.register_backend_factory("cpu", cpu_client, priority=0, fail_quietly=False)


def _unhurried(channel: Channel) -> None:
    """From now on messages may take any time, and several threads may send."""
    channel.seconds = None
    channel.connection.settimeout(None)


def _set_up(connection: socket.socket) -> None:
    """Small messages leave at once, and a machine that is there no more is noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in SILENCE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _proof(config: EngineConfig, nonce: bytes, *, by: str) -> bytes:
    """That somebody knows the secret.

    Args:
        nonce: of the other side.
        by: ``leader`` or ``follower``, whose answers are of no use to the other.
    """
    return hmac.digest((config.master_secret or "").encode(), by.encode() + nonce, "sha256")


def _difference(ours: dict[str, str], theirs: dict[str, str], name: str) -> str | None:
    """Why a follower does not fit, in a line."""
    for setting, value in ours.items():
        if theirs.get(setting) != value:
            return f"{name} has {setting} {theirs.get(setting)}, and rank 0 has {value}: start all ranks alike"
    return None
