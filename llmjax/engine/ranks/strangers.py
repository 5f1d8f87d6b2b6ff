"""Connections whose other side has not proved yet that it knows a secret: few, so that they cannot shut a port."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Strangers:
    """Connections to a port that anybody may reach, each read by a thread of its own.

    A new one is always let in; where there are too many, the one that has sent nothing for longest has to go, so that
    processes without a proof keep out none that has one.

    Args:
        most: connections at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._there: dict[socket.socket, None] = {}  # the oldest first

    def add(self, connection: socket.socket) -> None:
        """Lets one in; the oldest one of too many finds its connection ended."""
        with self._lock:
            self._there[connection] = None
            oldest = next(iter(self._there)) if len(self._there) > self._most else None
            if oldest is not None:
                del self._there[oldest]
                with suppress(OSError):  # it has gone by itself
                    oldest.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it, which closes it

    def remove(self, connection: socket.socket) -> None:
        """It has said what it had to, or has gone; a second time nothing happens."""
        with self._lock:
            self._there.pop(connection, None)
