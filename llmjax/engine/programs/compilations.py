"""The number of programs that XLA compiles, in the whole process."""

from __future__ import annotations

import threading
from typing import Any

import jax


class CompileCounter:
    """Counts programs that XLA compiled or read from the cache, in the whole process."""

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0
        self._closed = False
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        if event == self.EVENT:
            with self._lock:
                self.count += 1

    def close(self) -> None:
        """Stops counting; a second call does nothing."""
        if not self._closed:
            self._closed = True
            jax.monitoring.unregister_event_duration_listener(self._listen)
