"""The process that tries grammars, ``python -m llmjax.constraints.trial_main``; ``trial`` starts it.

Standard input is a socket, and the process ends with it. The vocabulary comes first. Each grammar is tried in a fork,
which shares the vocabulary and frees its memory when it ends. The system kills a fork that exceeds the computing time
in ``TrialLimits``, and the library aborts one that exceeds the memory.
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which may finish requests first
    connection = socket.socket(fileno=0)
    if (frame := receive_frame(connection)) is None:
        return
    trials = _Trials(vocabulary_of(frame).for_matchers(), cpu_seconds=limits["cpu_seconds"], memory=limits["memory"])
    del frame
    signal.signal(signal.SIGUSR1, trials.end)
    signal.signal(signal.SIGUSR2, trials.step_back)
    send_frame(connection, b"")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library reports when it aborts, which the server tells anyway
    while (grammar := receive_frame(connection)) is not None:
        code, error = trials.run(grammar.decode())
        send_frame(connection, written(code, error))


@dataclass
class _Trials:
    """Runs trials in forks, one after the other.

    Args:
        cpu_seconds, memory: see ``TrialLimits``.
    """

    vocabulary: LLTokenizer
    cpu_seconds: float
    memory: int
    running: int | None = None

    def run(self, grammar: str) -> tuple[int, bytes]:
        """Runs a fork; returns its exit status (negative: the signal that killed it) and the library's objection."""
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
        """A signal handler: kills the running fork immediately."""
        if self.running:
            os.kill(self.running, signal.SIGKILL)

    def step_back(self, signum: int, frame: FrameType | None) -> None:
        """A signal handler: lowers the priority of the running fork below other work of the machine."""
        if self.running:
            os.setpriority(os.PRIO_PROCESS, self.running, NICENESS)

    def _try(self, grammar: str, writer: int) -> None:
        """Tries a grammar inside the fork; does not return."""
        try:
            os.close(0)
            _limit_memory(self.memory)
            signal.setitimer(signal.ITIMER_PROF, self.cpu_seconds)  # nothing catches its signal, so it kills
            matcher = make_matcher(self.vocabulary, grammar)
            if matcher.is_error():
                os.write(writer, matcher.get_error().encode("utf-8", "replace")[:ERROR_BYTES])
            os._exit(0)
        finally:
            os._exit(1)


def _limit_memory(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # macOS cannot limit the address space
        pages = int(Path("/proc/self/statm").read_bytes().split()[0])
        most = pages * resource.getpagesize() + STACK_BYTES + size
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
