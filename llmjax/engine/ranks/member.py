"""The part of a group that all ranks have in common: each notices at once when another one has gone."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar

from llmjax.config import EngineConfig
from llmjax.engine.clients.wire import Channel
from llmjax.engine.ranks.lifeline import Lifeline
from llmjax.engine.ranks.wire import Alive
from llmjax.errors import EngineDead, LLMJaxError

T = TypeVar("T")

CAUSE_SECONDS = 5.0  # from a failed exchange between devices to the end of the other process's connection, at most
PULSE_SECONDS = 10.0  # between a process's signs of life
SILENT_SECONDS = 120  # without a sign of life, after which a process that is still connected counts as gone


class Member:
    """One rank's side of a group of several processes. It is lost when any of the other ranks has gone.

    Args:
        config: settings of this rank.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.size = config.nnodes
        self._config = config
        self._lock = threading.Lock()  # guards the fields below
        self._closed = False
        self._lost: LLMJaxError | None = None
        self._is_lost = threading.Event()
        self._watchers: list[Callable[[LLMJaxError], None]] = []
        self._lifeline: Lifeline | None = None

    @property
    def channels(self) -> Sequence[Channel]:
        """Connections to other ranks."""
        raise NotImplementedError

    def end_with_process(self) -> None:
        """See `Group`."""
        self._lifeline = Lifeline([channel.connection for channel in self.channels])

    def watch(self, lost: Callable[[LLMJaxError], None]) -> None:
        """See `Group`."""
        with self._lock:
            self._watchers.append(lost)
            already = self._lost
        if already is not None:
            lost(already)

    def cause(self, error: Exception) -> Exception:
        """See `Group`. Waits a little, because the devices may fail before the connection ends."""
        if not isinstance(error, LLMJaxError):
            self._is_lost.wait(CAUSE_SECONDS)
        return self._lost or error

    def close(self) -> None:
        """See `Group`."""
        with self._lock:
            self._closed = True
        if self._lifeline is not None:
            self._lifeline.close()

    def unless_lost(self, wait: Callable[[], T]) -> T:
        """Calls something that waits for the other ranks: JAX waits for one that has gone as long as for a late one.

        Args:
            wait: runs on another thread, where it may stay.

        Returns:
            What ``wait`` has returned.

        Raises:
            EngineDead: a rank has gone meanwhile.
        """
        made: Future[T] = Future()

        def run() -> None:
            try:
                result = wait()
            except BaseException as error:
                with suppress(InvalidStateError):  # no thread waits any more
                    made.set_exception(error)
            else:
                with suppress(InvalidStateError):
                    made.set_result(result)

        def end(error: LLMJaxError) -> None:
            with suppress(InvalidStateError):  # the call had returned
                made.set_exception(error)

        self.watch(end)
        threading.Thread(target=run, name="group-wait", daemon=True).start()
        return made.result()

    def _keep_alive(self, channel: Channel) -> None:
        """Sends another rank signs of life, and has the thread that receives raise BlockingIOError if it sends none."""
        silence = struct.pack("ll", SILENT_SECONDS, 0)
        channel.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, silence)

        def live() -> None:
            with suppress(OSError):  # the other rank has ended
                while True:
                    time.sleep(PULSE_SECONDS)
                    channel.send(Alive())

        threading.Thread(target=live, name="group-pulse", daemon=True).start()

    def _set_lost(self, error: LLMJaxError) -> bool:
        """Notes why the group has ended; returns False if it had ended, or was closed, before."""
        with self._lock:
            if self._closed or self._lost is not None:
                return False
            self._lost = error
        self._is_lost.set()
        return True

    def _notify_watchers(self, error: LLMJaxError) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher(error)


def gone(name: str, error: Exception | None = None) -> EngineDead:
    """The error for the end of a connection: how a process's end shows depends on what this side does meanwhile.

    Args:
        name: the other rank, as messages call it.
        error: what the connection raised; None: it was closed.
    """
    if isinstance(error, BlockingIOError):
        return EngineDead(f"{name} has given no sign of life for {SILENT_SECONDS} s")
    if error is None or isinstance(error, ConnectionError):
        return EngineDead(f"{name} has gone")
    return EngineDead(f"{name} cannot be reached: {error}")
