"""Processes for work that may take too much, and may be killed for it."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from typing import Any


class LimitedProcess:
    """A fresh interpreter at the other end of a socket. It ends with the socket, or when it is killed.

    Args:
        module: what ``python -m`` runs there. Its standard input is its end of the socket, its argument the limits, as
            JSON; it sets them itself.
        limits: a dataclass.
        environment: all that it has of one.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, module: str, limits: Any, *, environment: Mapping[str, str]) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            # Without site-packages' start-up files: nothing of JAX is there, and it starts quickly.
            command = [sys.executable, "-S", "-P", "-m", module, json.dumps(dataclasses.asdict(limits))]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=dict(environment),
                    start_new_session=True,
                )
            except OSError:
                self.socket.close()
                raise
        weakref.finalize(self, _end, self.socket, self._process)  # at exit, too

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        """Tells it something that it listens for."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Ends it, and does not wait for that."""
        self._process.kill()

    def exit_code(self) -> int:
        """What it has ended with, where nothing comes from it any more."""
        self._process.kill()  # its socket may be closed, but not by its end
        return self._process.wait()


def _end(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.kill()
    process.wait()
