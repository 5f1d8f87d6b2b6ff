"""The group's side at rank 0: it sends commands to the other ranks, and receives their answers."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

import msgspec

from llmjax import host_memory
from llmjax.config import EngineConfig
from llmjax.engine.clients.wire import Channel, Failed, Leave, Message
from llmjax.engine.device.commands import ProgramName, ReadPages, Values, WritePages
from llmjax.engine.ranks.distributed import initialize
from llmjax.engine.ranks.group import StartedRanks
from llmjax.engine.ranks.join import Gathering, Peer, free_port, listen, proof
from llmjax.engine.ranks.member import Member, gone
from llmjax.engine.ranks.wire import (
    Agreed,
    Alive,
    Chosen,
    Compile,
    Compiled,
    Hidden,
    Holds,
    Loaded,
    Meet,
    Met,
    Pages,
    PageShape,
    Welcome,
)
from llmjax.errors import ConfigError, EngineDead, LLMJaxError
from llmjax.kernels.choices import Choices
from llmjax.kernels.cpu import shared_sum

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEAVE_SECONDS = 2.0  # how long the other ranks may take to end by themselves


class Leader(Member):
    """The group at rank 0; see `RankZero`.

    Args:
        config: settings of rank 0, which those of the other ranks must fit.
        local: the other ranks, if this process has started them; the group ends them.

    Raises:
        ConfigError: a rank has not come, has other settings, or does not know the secret; the address is not this
            machine's, or the port is taken.
    """

    def __init__(self, config: EngineConfig, local: StartedRanks | None) -> None:
        super().__init__(config)
        self._local = local
        self._hidden: SimpleQueue[bytes | None] = SimpleQueue()  # from the stage before; None: a rank has gone
        with listen(config) as listener:
            self._peers = Gathering(config, local).peers(listener)
        self._port = free_port(config.master_addr)
        machines = Counter([host_memory.machine(), *(peer.machine for peer in self._peers)])
        self.neighbors = machines[host_memory.machine()]
        for peer in self._peers:
            peer.channel.limit = 2**32 - 1
            peer.channel.send(Welcome(proof(config, peer.nonce, by="leader"), self._port, machines[peer.machine]))
            self._keep_alive(peer.channel)
            threading.Thread(target=self._receive, args=(peer,), name=f"rank-{peer.rank}", daemon=True).start()

    @property
    def channels(self) -> list[Channel]:
        return [peer.channel for peer in self._peers]

    def meet(self) -> None:
        if not self._config.is_staged:  # stages share no program
            initialize(self, self._config, port=self._port, address=self._peers[0].channel.address)

    def shares_memory(self, devices: int) -> bool:
        try:
            name = shared_sum.make(devices)
        except shared_sum.NotShared as error:
            name, why = "", f"rank 0: {error}"
        else:
            why = self._why_not_shared(name, devices)
            shared_sum.unnamed(name)
        for peer in self._peers:
            peer.channel.send(Meet("" if why else name, devices))
        if why:
            logger.info("ranks add up over the network, because they share no memory (%s)", why)
            return False
        self.watch(lambda lost: shared_sum.stop())
        return True

    def _why_not_shared(self, name: str, devices: int) -> str:
        """Why a rank cannot use shared memory; empty if all can."""
        reasons = []
        for peer in self._peers:
            peer.channel.send(Meet(name, devices))
        try:
            shared_sum.attach(name, devices)
        except shared_sum.NotShared as error:
            reasons.append(f"rank 0: {error}")
        reasons += [f"{peer.name}: {why}" for peer in self._peers if (why := peer.met.result().why)]
        return reasons[0] if reasons else ""

    def choose(self, make: Callable[[], Choices]) -> Choices:
        choices = make()
        for peer in self._peers:
            peer.channel.send(Chosen([(choice.kind, list(choice.steps)) for choice in choices.made]))
        return choices

    def agree(self, model: str, pages: list[int]) -> list[int]:
        least = pages
        for peer in self._peers:
            loaded = peer.loaded.result()
            if loaded.model != model:
                self._refuse(
                    f"{peer.name} has loaded another model than rank 0 (other weights, or the same in other types, "
                    "for their CPUs differ: set dtype; or other steps, for their GPUs differ: set max_num_seqs and "
                    "max_num_batched_tokens)"
                )
            least = [min(*counts) for counts in zip(least, loaded.pages, strict=True)]
        for peer in self._peers:
            peer.channel.send(Agreed(least))
        return least

    def everywhere(self, program: ProgramName, compile: Callable[[], T]) -> T:
        with self._lock:
            self._check()
            new = program not in self._peers[0].compiled
            waiting = [peer.compiled.setdefault(program, Future()) for peer in self._peers]
        if new:
            self.broadcast(Compile(program))
        made = compile()
        for future in waiting:
            future.result()
        return made

    def broadcast(self, message: Message) -> None:
        with self._lock:
            self._check()
        encoded = self._peers[0].channel.encode(message)
        for peer in self._peers:
            self._send(peer, encoded)

    def gather(self, command: ReadPages) -> list[Future[list[Values]]]:
        with self._lock:
            self._check()
            answers = [peer.pages.setdefault(command.number, Future()) for peer in self._peers]
        self.broadcast(command)
        return answers

    def scatter(self, command: WritePages) -> None:
        rest = iter(command.arrays)
        for peer in self._peers:
            own = list(itertools.islice(rest, len(peer.holds.result().groups[command.group])))
            self._send(peer, peer.channel.encode(WritePages(command.group, command.pages, own)))

    def page_shapes(self, group: int) -> list[PageShape]:
        return [shape for peer in self._peers for shape in peer.holds.result().groups[group]]

    def send_hidden(self, data: bytes) -> None:
        raise NotImplementedError("rank 0 has the last stage")

    def receive_hidden(self) -> bytes:
        received = self._hidden.get()
        if received is None:
            self._hidden.put(None)  # for the next call
            raise self._lost or EngineDead("the engine is closed")
        return received

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting: list[Future[Any]] = [future for peer in self._peers for future in peer.compiled.values()]
            waiting += [future for peer in self._peers for future in peer.pages.values()]
        super().close()
        self._hidden.put(None)
        for future in waiting:  # otherwise compiling threads would wait for ranks that have left
            if not future.done():
                future.set_exception(EngineDead("the engine is closed"))
        for peer in self._peers:
            with suppress(OSError):  # it has gone already
                peer.channel.send(Leave())
            peer.channel.end()
        # JAX aborts processes that find its coordinator, which is in this one, gone before they have ended.
        deadline = time.monotonic() + LEAVE_SECONDS
        for peer in self._peers:
            peer.ended.wait(max(0.0, deadline - time.monotonic()))
        if self._local is not None:
            self._local.end()

    def _receive(self, peer: Peer) -> None:
        """Receives the messages of another rank, until it ends."""
        error: LLMJaxError | None = None
        try:
            for message in peer.messages:
                if isinstance(message, Failed):
                    error = EngineDead(f"{peer.name}: {message.failure.error()}")
                else:
                    self._take(peer, message)
        except (OSError, msgspec.MsgspecError) as broken:
            error = error or gone(peer.name, broken)
            if isinstance(broken, BlockingIOError) and self._local is not None:
                self._local.kill(peer.rank)
        peer.ended.set()
        self._lose(peer, error or gone(peer.name))

    def _take(self, peer: Peer, message: Message) -> None:
        match message:
            case Met():
                peer.met.set_result(message)
            case Loaded():
                peer.loaded.set_result(message)
            case Holds():
                peer.holds.set_result(message)
            case Pages():
                with self._lock:
                    pages = peer.pages.pop(message.number)
                pages.set_result(message.arrays)
            case Hidden() if peer.rank + 1 < self.size:
                self._relay(self._peers[peer.rank], message)  # to the next rank
            case Hidden():
                self._hidden.put(message.data)
            case Compiled():
                with self._lock:
                    future = peer.compiled[message.program]
                if message.failure is None:
                    future.set_result(None)
                else:
                    future.set_exception(message.failure.error())
            case Alive():
                pass

    def _relay(self, peer: Peer, message: Message) -> None:
        try:
            peer.channel.send(message)
        except OSError as error:
            self._lose(peer, gone(peer.name, error))

    def _lose(self, peer: Peer, error: LLMJaxError) -> None:
        if not self._set_lost(error):
            return
        logger.error("%s", error)
        self._notify_watchers(error)  # before anything that may wait
        self._hidden.put(None)
        with self._lock:
            awaited = [future for other in self._peers for future in other.awaited]
        for future in awaited:
            if not future.done():
                future.set_exception(error)
        for other in self._peers:
            if other is not peer:
                other.refuse(str(error))

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _send(self, peer: Peer, encoded: bytes) -> None:
        try:
            peer.channel.send_encoded(encoded)
        except OSError as error:
            self._lose(peer, gone(peer.name, error))
            raise self._lost or error from error

    def _refuse(self, reason: str) -> NoReturn:
        """Ends the group before it has begun."""
        with self._lock:
            self._closed = True
        for peer in self._peers:
            peer.refuse(reason)
        raise ConfigError(reason)
