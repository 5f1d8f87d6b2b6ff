"""Event loops whose clock a test moves: what waits for minutes is due at once, however busy the machine is."""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is put forward, once nothing is left to do at its present time.

    Args:
        jumps: it starts at 0, stands still, and jumps to what is due next as soon as nothing else is left: for loops
            that nobody outside talks to.
    """

    def __init__(self, *, jumps: bool = False) -> None:
        self._ahead = 0.0
        self._orders: list[tuple[float, threading.Event]] = []
        self._jumps = jumps
        super().__init__(_Selector(self._idle))

    def time(self) -> float:
        return self._ahead if self._jumps else super().time() + self._ahead

    def put_forward(self, seconds: float) -> None:
        """From another thread: returns when what is due after ``seconds`` more has been told so."""
        done = threading.Event()
        self._orders.append((seconds, done))
        self.call_soon_threadsafe(lambda: None)  # wakes it
        done.wait()

    def _idle(self, timeout: float | None) -> bool:
        """Moves the clock; whether it has done so.

        Args:
            timeout: seconds to what is due next, if anything is.
        """
        if self._orders:
            seconds, done = self._orders.pop(0)
            self._ahead += seconds
            self.call_soon(self.call_soon, done.set)  # after the timers
            return True
        if self._jumps and timeout is not None:
            self._ahead += timeout
            return True
        return False


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    def __init__(self, idle: Callable[[float | None], bool]) -> None:
        super().__init__()
        self._when_idle = idle

    def select(self, timeout: float | None = None) -> Any:
        """Selects without waiting: asyncio passes 0 while there is something to do."""
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        if (events := super().select(0)) or self._when_idle(timeout):
            return events
        return super().select(timeout)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like ``asyncio.run``, with a clock that jumps over every wait."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(jumps=True)) as runner:
        return runner.run(main)
