"""Threads for work of which some takes seconds: clients take turns, and no client's work holds up all others'."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from llmjax.errors import QueueFull

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TurnLimits:
    """How much is done at a time, and how much waits.

    Args:
        short: pieces of work that run and have not been found to take long.
        long: those that have.
        long_each: of one client.
        waiting: pieces of work that have not begun.
        waiting_each: of one client.
    """

    short: int = 2
    long: int = 2
    long_each: int = 1
    waiting: int = 128
    waiting_each: int = 32


class Turns:
    """Runs work on threads of its own, which start when they are first needed. Thread-safe.

    Args:
        name: of the threads.
        limits: beyond them work is refused.
    """

    def __init__(self, name: str, *, limits: TurnLimits | None = None) -> None:
        self._name = name
        self._limits = limits or TurnLimits()
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[_Piece]] = OrderedDict()  # by client; the first one's turn is next
        self._running = 0
        self._long: list[str] = []  # whose work takes long

    def submit(self, client: str, work: Callable[[Turn], T]) -> Future[T]:
        """Has work done when its client's turn comes.

        Args:
            client: whose it is.
            work: gets its turn, which it tells when it takes long.

        Raises:
            QueueFull: too much of this client's work waits already, or of all clients'.
        """
        future: Future[T] = Future()
        with self._lock:
            own = len(self._waiting.get(client, ()))
            if own >= self._limits.waiting_each or sum(map(len, self._waiting.values())) >= self._limits.waiting:
                raise _full(self._name)
            self._waiting.setdefault(client, deque()).append(_Piece(client, work, future))
            starts = self._running - len(self._long) < self._limits.short
            self._running += starts
        if starts:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def _work(self) -> None:
        """Does what waits until nothing does, or until as many others do."""
        while (piece := self._next()) is not None:
            turn = Turn(self, piece.client)
            if piece.future.set_running_or_notify_cancel():
                try:
                    result = piece.work(turn)
                except BaseException as error:
                    piece.future.set_exception(error)
                else:
                    piece.future.set_result(result)
            with self._lock:
                if turn.is_long:
                    self._long.remove(piece.client)

    def _next(self) -> _Piece | None:
        with self._lock:
            if not self._waiting or self._running - len(self._long) > self._limits.short:
                self._running -= 1
                return None
            client, pieces = self._waiting.popitem(last=False)
            piece = pieces.popleft()
            if pieces:
                self._waiting[client] = pieces  # behind all others
            return piece

    def takes_long(self, turn: Turn) -> None:
        """See ``Turn.takes_long``."""
        with self._lock:
            if turn.is_long:
                return
            if len(self._long) >= self._limits.long or self._long.count(turn.client) >= self._limits.long_each:
                raise _full(self._name)
            turn.is_long = True
            self._long.append(turn.client)
            starts = bool(self._waiting)
            self._running += starts
        if starts:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()


class Turn:
    """One piece of work's time on a thread."""

    def __init__(self, turns: Turns, client: str) -> None:
        self._turns = turns
        self.client = client
        self.is_long = False

    def takes_long(self) -> None:
        """Lets short work go on beside this.

        Raises:
            QueueFull: there is too much work already that takes long; this has to end.
        """
        self._turns.takes_long(self)


@dataclass(frozen=True)
class _Piece:
    client: str
    work: Callable[[Turn], Any]
    future: Future[Any]


def _full(name: str) -> QueueFull:
    return QueueFull(f"{name} of other requests are being worked on", retry_after=1.0)
