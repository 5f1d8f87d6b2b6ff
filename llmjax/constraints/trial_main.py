"""The process that tries grammars: ``python -m llmjax.constraints.trial_main``, started by ``trial``, ends with its
socket.

Standard input is the socket; the vocabulary comes first. What takes more computing time than ``TrialLimits`` allow is
killed by the system, and so, by the library's own end, is what takes more memory.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path

from llmjax.constraints.matchers import STACK_BYTES, make_matcher
from llmjax.constraints.trial_wire import LAST, MORE, vocabulary_of
from llmjax.frames import receive_frame, send_frame


def main() -> None:
    limits = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which may have requests to finish
    connection = socket.socket(fileno=0)
    if (frame := receive_frame(connection)) is None:
        return
    vocabulary = vocabulary_of(frame).for_matchers()
    del frame
    _limit_memory(limits["memory"])
    most_kept = _memory()[1] + limits["kept_memory"]
    send_frame(connection, b"")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library writes about its own end, which the server tells
    while (grammar := receive_frame(connection)) is not None:
        # Counts this process's computing time, and nothing catches its signal.
        signal.setitimer(signal.ITIMER_PROF, limits["cpu_seconds"])
        matcher = make_matcher(vocabulary, grammar.decode())
        error = matcher.get_error() if matcher.is_error() else ""
        del matcher
        signal.setitimer(signal.ITIMER_PROF, 0)
        leaving = _memory()[1] > most_kept
        send_frame(connection, (LAST if leaving else MORE) + error.encode("utf-8", "replace"))
        if leaving:
            return


def _limit_memory(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # macOS has no limit of the address space
        most = _memory()[0] + STACK_BYTES + size
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _memory() -> tuple[int, int]:
    """Bytes of address space, and those that are resident; where the system does not say, the most that ever were."""
    if sys.platform == "linux":
        size, resident = Path("/proc/self/statm").read_bytes().split()[:2]
        return int(size) * resource.getpagesize(), int(resident) * resource.getpagesize()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most, most


if __name__ == "__main__":
    main()
