"""The process that ``lifeline`` starts: ``python lifeline_main.py PID FILE…`` waits for the end of the thread that has
started it, and then ends the connections that it was given."""

import contextlib
import ctypes
import os
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1
LOOK_SECONDS = 1.0  # if the thread had ended before it could be asked to say so


def main() -> None:
    parent, *files = map(int, sys.argv[1:])
    for others in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # whatever is sent to all: the parent may go on
        signal.signal(others, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGUSR1})
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    while os.getppid() == parent and signal.sigtimedwait({signal.SIGUSR1}, LOOK_SECONDS) is None:
        pass
    for file in files:
        with contextlib.suppress(OSError):  # it has ended
            socket.socket(fileno=file).shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main()
