"""The process that tries grammars: ``python -m llmjax.constraints.trial_main``, started by ``trial``, ends with its
socket.

Standard input is the socket; the vocabulary comes first. Each grammar is tried in a fork of the process, which shares
the vocabulary and takes what it has allocated with it. What takes more computing time than ``TrialLimits`` allow is
killed by the system, and so, by the library's own end, is what takes more memory.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from llguidance import LLTokenizer

from llmjax.constraints.matchers import STACK_BYTES, make_matcher
from llmjax.constraints.trial_wire import ERROR_BYTES, NICENESS, vocabulary_of, written
from llmjax.frames import receive_frame, send_frame


def main() -> None:
    limits = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which may have requests to finish
    connection = socket.socket(fileno=0)
    if (frame := receive_frame(connection)) is None:
        return
    trials = _Trials(vocabulary_of(frame).for_matchers(), cpu_seconds=limits["cpu_seconds"], memory=limits["memory"])
    del frame
    signal.signal(signal.SIGUSR1, trials.end)
    signal.signal(signal.SIGUSR2, trials.step_back)
    send_frame(connection, b"")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library writes about its own end, which the server tells
    while (grammar := receive_frame(connection)) is not None:
        code, error = trials.run(grammar.decode())
        send_frame(connection, written(code, error))


@dataclass
class _Trials:
    """Forks, one after the other.

    Args:
        cpu_seconds, memory: as of ``TrialLimits``.
    """

    vocabulary: LLTokenizer
    cpu_seconds: float
    memory: int
    running: int | None = None

    def run(self, grammar: str) -> tuple[int, bytes]:
        """A fork's exit status (negative: the signal that has killed it), and what the library says."""
        reader, writer = os.pipe()
        self.running = os.fork()
        if not self.running:
            self._try(grammar, writer)
        os.close(writer)
        status = os.waitpid(self.running, 0)[1]
        self.running = None
        error = os.read(reader, ERROR_BYTES)
        os.close(reader)
        return os.waitstatus_to_exitcode(status), error

    def end(self, signum: int, frame: FrameType | None) -> None:
        """The one that runs, at once."""
        if self.running:
            os.kill(self.running, signal.SIGKILL)

    def step_back(self, signum: int, frame: FrameType | None) -> None:
        """The one that runs, behind all other work of the machine."""
        if self.running:
            os.setpriority(os.PRIO_PROCESS, self.running, NICENESS)

    def _try(self, grammar: str, writer: int) -> None:
        """In the fork, which does not return."""
        try:
            os.close(0)
            _limit_memory(self.memory)
            signal.setitimer(signal.ITIMER_PROF, self.cpu_seconds)  # nothing catches its signal
            matcher = make_matcher(self.vocabulary, grammar)
            if matcher.is_error():
                os.write(writer, matcher.get_error().encode("utf-8", "replace")[:ERROR_BYTES])
            os._exit(0)
        finally:
            os._exit(1)


def _limit_memory(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # macOS has no limit of the address space
        pages = int(Path("/proc/self/statm").read_bytes().split()[0])
        most = pages * resource.getpagesize() + STACK_BYTES + size
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
