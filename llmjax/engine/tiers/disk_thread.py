"""A thread for calls that wait for the disk, so that no other thread has to."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0  # how long the end of an engine may wait for the disk

Call = Callable[[], int | None]


class DiskThread:
    """Makes calls in the order in which they come.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Call, int] | None] = queue.SimpleQueue()
        self._load = _Load()
        # A daemon: a disk that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=_work, args=(self._queue, self._load), name=name, daemon=True)
        weakref.finalize(self, self._queue.put, None).atexit = False
        self._thread.start()

    def add(self, call: Call) -> None:
        """Makes a call when it is its turn; it may return bytes for `take_bytes`."""
        self._queue.put((call, 0))

    def offer(self, call: Call, num_bytes: int, *, limit: int) -> bool:
        """Adds a call, unless the waiting calls and this one together hold more than ``limit`` bytes.

        Args:
            num_bytes: bytes that this call holds.

        Returns:
            Whether the call will be made.
        """
        if not self._load.take(num_bytes, limit):
            return False
        self._queue.put((call, num_bytes))
        return True

    def take_bytes(self) -> int:
        """The sum of the bytes that calls have returned since the last time."""
        return self._load.take_done()

    def close(self, seconds: float) -> bool:
        """Makes no calls but those that have been added.

        Args:
            seconds: how long to wait for these.

        Returns:
            Whether all of them are made.
        """
        self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()


class _Load:
    """Bytes that calls hold, and bytes that they returned."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = self._done = 0

    def take(self, num_bytes: int, limit: int) -> bool:
        with self._lock:
            if self._held + num_bytes > limit:
                return False
            self._held += num_bytes
            return True

    def give_back(self, num_bytes: int, done: int) -> None:
        with self._lock:
            self._held -= num_bytes
            self._done += done

    def take_done(self) -> int:
        with self._lock:
            done, self._done = self._done, 0
            return done


def _work(calls: queue.SimpleQueue[tuple[Call, int] | None], load: _Load) -> None:
    while (task := calls.get()) is not None:
        call, num_bytes = task
        done: int | None = 0
        try:
            done = call()
        except Exception:
            logger.exception("the KV cache on disk")
        load.give_back(num_bytes, done or 0)
        del task, call  # or it would hold a page until the next one
