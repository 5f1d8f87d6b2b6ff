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
        long: pieces that run and have been found to take long.
        long_each: how many of these one client may have.
        waiting: pieces of work that have not begun.
        waiting_each: how many of these one client may have.
        postponed: those that were found to take long when there was no place for them, and begin again later.
        postponed_each: how many of these one client may have.
    """

    short: int = 2
    long: int = 2
    long_each: int = 1
    waiting: int = 128
    waiting_each: int = 32
    postponed: int = 16
    postponed_each: int = 4


class Turns:
    """Runs work on threads of its own, which start when they are first needed. Thread-safe.

    Args:
        name: name of the threads.
        limits: limits beyond which work is refused.
    """

    def __init__(self, name: str, *, limits: TurnLimits | None = None) -> None:
        self._name = name
        self._limits = limits or TurnLimits()
        self._lock = threading.Lock()
        self._waiting = _FairQueue(most=self._limits.waiting, each=self._limits.waiting_each)
        self._postponed = _FairQueue(most=self._limits.postponed, each=self._limits.postponed_each)
        self._running = 0
        self._long: list[str] = []  # whose work takes long

    def submit(self, client: str, work: Callable[[Turn], T]) -> Future[T]:
        """Has work done when its client's turn comes.

        Args:
            client: the client that the work is for.
            work: gets its turn, which it tells when it takes long.

        Returns:
            What comes of it; ``QueueFull`` if it takes long, and so does too much else.

        Raises:
            QueueFull: too much of this client's work waits already, or of all clients'.
        """
        future: Future[T] = Future()
        with self._lock:
            if not self._waiting.push(_Piece(client, work, future)):
                raise self._full()
            self._start_another()
        return future

    def takes_long(self, turn: Turn) -> None:
        """See ``Turn.takes_long``."""
        with self._lock:
            if turn.is_long:
                return
            if not self._has_place(turn.piece.client):
                raise _Postponed if self._postponed.push(turn.piece) else self._full()
            turn.is_long = True
            self._long.append(turn.piece.client)
            self._start_another()

    def _start_another(self) -> None:
        if self._waiting and self._running - len(self._long) < self._limits.short:
            self._running += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        """Does what waits until nothing does, or as many others do it."""
        while (turn := self._next()) is not None:
            piece = turn.piece
            if piece.begins():
                try:
                    result = piece.work(turn)
                except _Postponed:
                    pass
                except BaseException as error:
                    piece.future.set_exception(error)
                else:
                    piece.future.set_result(result)
            with self._lock:
                if turn.is_long:
                    self._long.remove(piece.client)

    def _next(self) -> Turn | None:
        with self._lock:
            if (piece := self._postponed.pop(self._has_place)) is not None:
                self._long.append(piece.client)
                self._start_another()
                return Turn(self, piece, is_long=True)
            if self._running - len(self._long) <= self._limits.short and (piece := self._waiting.pop()) is not None:
                return Turn(self, piece)
            self._running -= 1
            return None

    def _has_place(self, client: str) -> bool:
        """Whether its work may take long."""
        return len(self._long) < self._limits.long and self._long.count(client) < self._limits.long_each

    def _full(self) -> QueueFull:
        return QueueFull(f"{self._name} of other requests are being worked on", retry_after=1.0)


class Turn:
    """One piece of work's time on a thread."""

    def __init__(self, turns: Turns, piece: _Piece, *, is_long: bool = False) -> None:
        self._turns = turns
        self.piece = piece
        self.is_long = is_long

    def takes_long(self) -> None:
        """Lets short work go on beside this. What it raises says that there is too much work already that takes long;
        this has to end, and may begin again later."""
        self._turns.takes_long(self)


class _Postponed(Exception):
    """Work has to begin again later."""


@dataclass(eq=False)
class _Piece:
    client: str
    work: Callable[[Turn], Any]
    future: Future[Any]

    def begins(self) -> bool:
        """Whether anybody still waits for it."""
        return self.future.running() or self.future.set_running_or_notify_cancel()


class _FairQueue:
    """Work that waits: of each client in the order it came, of all clients in turn."""

    def __init__(self, *, most: int, each: int) -> None:
        self._most = most
        self._each = each
        self._of_client: OrderedDict[str, deque[_Piece]] = OrderedDict()  # the first one's turn is next

    def __bool__(self) -> bool:
        return bool(self._of_client)

    def push(self, piece: _Piece) -> bool:
        """Adds work, if there is room."""
        num_waiting = len(self._of_client.get(piece.client, ()))
        if num_waiting >= self._each or sum(map(len, self._of_client.values())) >= self._most:
            return False
        self._of_client.setdefault(piece.client, deque()).append(piece)
        return True

    def pop(self, may: Callable[[str], bool] = lambda client: True) -> _Piece | None:
        """The next one's of the clients that may."""
        if (client := next(filter(may, self._of_client), None)) is None:
            return None
        pieces = self._of_client.pop(client)
        piece = pieces.popleft()
        if pieces:
            self._of_client[client] = pieces  # at the end of the line
        return piece
