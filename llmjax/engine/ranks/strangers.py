"""Connections whose other side has not proved yet that it knows a secret: limited, so that they cannot block a port."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Strangers:
    """Unproved connections to a port that anybody may reach, each read by its own thread.

    A new connection is always accepted; if there are too many, the oldest one is ended, so that processes that do not
    know the secret cannot keep out those that do.

    Args:
        most: connections at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._there: dict[socket.socket, None] = {}  # the oldest first

    def add(self, connection: socket.socket) -> None:
        """Adds a connection; if there are too many, the oldest one is ended."""
        with self._lock:
            self._there[connection] = None
            oldest = next(iter(self._there)) if len(self._there) > self._most else None
            if oldest is not None:
                del self._there[oldest]
                with suppress(OSError):  # it has gone by itself
                    oldest.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it, which closes it

    def remove(self, connection: socket.socket) -> None:
        """Removes a connection that has proved the secret or ended; a second call does nothing."""
        with self._lock:
            self._there.pop(connection, None)
