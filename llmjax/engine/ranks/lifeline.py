"""Connections that end as soon as a process is killed.

The system ends them when the last thread of the process has ended, which takes seconds where some of them are of a low
priority and others want the cores, or where much memory has to be given back first. A small process (``lifeline_main``)
has copies of the connections and ends them when the thread that has started it ends.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

PROGRAM = Path(__file__).with_name("lifeline_main.py")  # a file, not a module: it must not import this package


class Lifeline:
    """Has connections end with this process, until it is closed.

    Args:
        connections: to other processes; they stay the caller's.
    """

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        if sys.platform == "linux":  # elsewhere no process is told of another one's end
            # A thread of its own, which lives as long as the process, whoever has called this.
            threading.Thread(target=self._run, args=(connections,), name="lifeline", daemon=True).start()
            self._started.wait()

    def close(self) -> None:
        """Leaves the connections to their owner; a second call does nothing."""
        if self._process is not None:
            self._process.kill()

    def _run(self, connections: Sequence[socket.socket]) -> None:
        files = [connection.fileno() for connection in connections]
        # Without site-packages, and with the interpreter's own settings alone.
        command = [sys.executable, "-I", "-S", str(PROGRAM), *map(str, (os.getpid(), *files))]
        # The mask is this thread's alone, and the process inherits it until it knows what to do with the signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1})
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=files)
        except OSError as error:
            logger.warning("that this process is killed will be noticed late: %s", error)
        finally:
            self._started.set()
        if self._process is not None:
            self._process.wait()
