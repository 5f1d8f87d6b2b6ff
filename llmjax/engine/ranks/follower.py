"""The group's side at ranks other than 0: it receives commands from rank 0, and answers them."""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec

from llmjax import host_memory
from llmjax.config import EngineConfig
from llmjax.engine.clients.wire import Channel, Leave
from llmjax.engine.ranks.distributed import initialize
from llmjax.engine.ranks.join import FIRST_SECONDS, NONCE_BYTES, connect, proof, remove_time_limits
from llmjax.engine.ranks.member import Member, gone
from llmjax.engine.ranks.settings import shared_settings
from llmjax.engine.ranks.wire import (
    Agreed,
    Alive,
    Challenge,
    Chosen,
    Hidden,
    Join,
    Loaded,
    Meet,
    Met,
    Refused,
    ToWorker,
    Welcome,
)
from llmjax.errors import ConfigError, EngineDead, LLMJaxError
from llmjax.kernels.choices import Choice, Choices
from llmjax.kernels.cpu import shared_sum

T = TypeVar("T")


class Follower(Member):
    """The group at a rank other than 0; see `Group`.

    Args:
        config: settings of this rank, which must fit those of rank 0.

    Attributes:
        channel: the connection to rank 0.
        messages: what rank 0 sends, until it ends, but for hidden states.

    Raises:
        ConfigError: rank 0 cannot be reached, has other settings, or does not know the secret.
    """

    messages: Iterator[Any]

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._where = f"rank 0 at {config.master_addr}:{config.master_port}"
        self.channel = Channel(connect(config), ToWorker, seconds=FIRST_SECONDS)
        self.messages = coming = self.channel.receive()
        try:
            challenge = self._next(Challenge)
            nonce = secrets.token_bytes(NONCE_BYTES)
            own_proof = proof(config, challenge.nonce, by="follower")
            self.channel.send(Join(config.node_rank, nonce, own_proof, shared_settings(config), host_memory.machine()))
            remove_time_limits(self.channel)
            welcome = self._next(Welcome)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{self._where} does not answer as one of llmjax does: {error}") from error
        if not hmac.compare_digest(welcome.proof, proof(config, nonce, by="leader")):
            raise ConfigError(f"{self._where} does not know the master_secret of this rank")
        self._port = welcome.port
        self.neighbors = welcome.neighbors
        self._agreed = False  # until then a refusal is an error of this rank's settings, not the loss of another rank
        received: SimpleQueue[Any] = SimpleQueue()
        self._hidden: SimpleQueue[bytes | None] = SimpleQueue()  # from the stage before; None: rank 0 has gone
        self.messages = iter(received.get, None)
        self._keep_alive(self.channel)
        threading.Thread(target=self._receive, args=(coming, received), name="rank-0", daemon=True).start()

    @property
    def channels(self) -> list[Channel]:
        return [self.channel]

    def meet(self) -> None:
        if not self._config.is_staged:  # stages share no program
            initialize(self, self._config, port=self._port, address=self.channel.address)

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

    def choose(self, make: Callable[[], Choices]) -> Choices:
        chosen: Chosen = self._next(Chosen)
        return Choices(tuple(Choice(kind, tuple(steps)) for kind, steps in chosen.choices))

    def agree(self, model: str, pages: list[int]) -> list[int]:
        self.channel.send(Loaded(model, pages))
        agreed: list[int] = self._next(Agreed).pages
        self._agreed = True
        return agreed

    def receive_hidden(self) -> bytes:
        received = self._hidden.get()
        if received is None:
            self._hidden.put(None)  # for the next call
            raise self._lost or EngineDead("rank 0 has gone")
        return received

    def send_hidden(self, data: bytes) -> None:
        self.channel.send(Hidden(data))

    def _receive(self, coming: Iterator[Any], received: SimpleQueue[Any]) -> None:
        """Receives the messages of rank 0, whatever this process waits for, so that its end is known at once."""
        error: LLMJaxError | None = EngineDead("rank 0 has gone")
        try:
            for message in coming:
                if isinstance(message, Hidden):
                    self._hidden.put(message.data)
                elif not isinstance(message, Alive):
                    received.put(message)
                if isinstance(message, Leave) or (isinstance(message, Refused) and not self._agreed):
                    error = None
                    break
                if isinstance(message, Refused):
                    error = EngineDead(message.reason)
                    break
        except (OSError, msgspec.MsgspecError) as broken:
            if not isinstance(broken, ConnectionError):
                error = gone(self._where, broken)
        received.put(None)
        self._hidden.put(None)
        if error is not None and self._set_lost(error):
            self._notify_watchers(error)

    def _next(self, kind: type[T]) -> Any:
        message = next(self.messages, None)
        if isinstance(message, kind):
            return message
        if isinstance(message, Refused):
            raise ConfigError(message.reason)
        raise ConfigError(f"{self._where} has gone")
