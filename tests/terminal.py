"""A program of the console script in a real terminal, for tests of what people type."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest


class Terminal:
    """``llmjax`` on a pseudo-terminal: what it shows, and the keys it gets.

    Args:
        home: the user's home folder.
        arguments: what follows ``llmjax``.
    """

    def __init__(self, home: Path, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "HOME": str(home), "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        # Like a terminal: tests that run in the background hand down that Ctrl-C is ignored.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "llmjax", *arguments],
                stdin=slave,
                stdout=slave,
                stderr=slave,
                env=environment,
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(slave, termios.TIOCSCTTY, 0),  # its own, so that it takes Ctrl-C
            )
        finally:
            signal.signal(signal.SIGINT, before)
            os.close(slave)
        self.shown = ""

    def wait_for(self, text: str, *, after: int = 0) -> int:
        """Reads until the text is shown, and returns where it ends."""
        while text not in self.shown[after:]:
            self._read()
        return self.shown.index(text, after) + len(text)

    def interrupt_until(self, text: str) -> int:
        """Ctrl-C, again while the text does not come."""
        after = len(self.shown)
        while text not in self.shown[after:]:
            os.kill(self.process.pid, signal.SIGINT)
            if select.select([self.master], [], [], 1)[0]:
                self._read()
        return self.wait_for(text, after=after)

    def _read(self) -> None:
        try:
            self.shown += os.read(self.master, 65536).decode(errors="replace")
        except OSError:  # nobody writes any more
            pytest.fail(self.shown)

    def type(self, line: str) -> None:
        os.write(self.master, f"{line}\n".encode())

    def end(self) -> int:
        try:
            return self.process.wait()
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self.master)
