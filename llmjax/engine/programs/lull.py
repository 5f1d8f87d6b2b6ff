"""A time in which nobody computes anything, for work that running requests should not wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

QUIET = 1.0  # seconds without a step after which nobody minds


class Lull:
    """When the last step was, and whether anybody wants the work that waits. Thread-safe.

    Args:
        clock: seconds.
        wanted: set when nothing waits any longer.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, wanted: threading.Event | None = None) -> None:
        self._clock = clock
        self._wanted = wanted or threading.Event()
        self._last_step = clock()  # the first request may come any moment

    def step(self) -> None:
        """There is one now."""
        self._last_step = self._clock()

    def end(self) -> None:
        """Somebody waits for the work itself: it is done at once from now on."""
        self._wanted.set()

    def wait(self) -> None:
        """Returns ``QUIET`` seconds after the last step, or when somebody waits for the work."""
        while not self._wanted.is_set() and (left := self._last_step + QUIET - self._clock()) > 0:
            self._wanted.wait(left)
