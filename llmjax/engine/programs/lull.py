"""Waits until no steps run, for background work that should not slow running requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

QUIET = 1.0  # seconds without a step, after which the work may begin


class Lull:
    """The time of the last step, and whether a thread waits for the work. Thread-safe.

    Args:
        clock: returns seconds.
        wanted: set when the work has to be done at once from now on.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, wanted: threading.Event | None = None) -> None:
        self._clock = clock
        self._wanted = wanted or threading.Event()
        self._last_step = clock()  # the first request may come any moment

    def step(self) -> None:
        """Notes that a step runs now."""
        self._last_step = self._clock()

    def end(self) -> None:
        """Has the work done at once from now on, because a thread waits for it."""
        self._wanted.set()

    def wait(self) -> None:
        """Returns ``QUIET`` seconds after the last step, or when a thread waits for the work."""
        while not self._wanted.is_set() and (left := self._last_step + QUIET - self._clock()) > 0:
            self._wanted.wait(left)
