"""The process that renders: ``python -m llmjax.templating.worker``, started by ``pool``, ends with its socket.

Standard input is the socket. A request takes what ``Limits`` allow: one that takes more computing time has the
process killed by the system, and one that takes more memory gets an error and a new process.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import sys
import time
from pathlib import Path

from llmjax.errors import ChatTemplateError, InvalidRequest
from llmjax.frames import receive_frame
from llmjax.templating.rendering import render
from llmjax.templating.wire import REPLY, Limits, RenderRequest, Status


def main() -> None:
    limits = Limits(**json.loads(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which may have requests to finish
    connection = socket.socket(fileno=0)
    time.tzset()  # reads the time zone while files can be read
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_AS, limits.memory)
    connection.sendall(REPLY.pack(Status.READY, False, 0))
    while (request := receive_frame(connection)) is not None:
        # Counts this process's computing time, and nothing catches its signal.
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
        status, leaving, text = _answer(request, limits)
        del request
        signal.setitimer(signal.ITIMER_PROF, 0)
        leaving = leaving or _resident_memory() > limits.kept_memory
        connection.sendall(REPLY.pack(status, leaving, len(text)) + text)
        if leaving:
            return


def _answer(data: bytearray, limits: Limits) -> tuple[Status, bool, bytes]:
    """How it ended, whether this process should end, and the text in UTF-8."""
    try:
        text = render(RenderRequest.from_bytes(data), max_chars=limits.chars)
        return Status.DONE, False, text.encode("utf-8", "surrogatepass")
    except ChatTemplateError as error:
        return Status.FAILED, False, _message(error)
    except InvalidRequest as error:
        return Status.REFUSED, False, _message(error)
    except MemoryError:
        return Status.FAILED, True, f"chat template: needs more than {limits.memory >> 20} MiB of memory".encode()


def _message(error: Exception) -> bytes:
    return " ".join(str(error).split())[:1000].encode("utf-8", "replace")


def _limit(kind: int, value: int) -> None:
    try:
        resource.setrlimit(kind, (value, value))
    except (ValueError, OSError):  # macOS has no limit of the address space
        print(f"llmjax: the limit {kind} of template processes is not available here", file=sys.stderr)


def _resident_memory() -> int:
    """Bytes. ``ru_maxrss`` would not do on Linux: it starts with what the server held when it started this process."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
