"""A test that hangs fails, and its message shows where each thread, task and process of it stands."""

from __future__ import annotations

import asyncio
import faulthandler
import io
import os
import re
import select
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

SLOW_SECONDS = 600  # that a slow test may take; `timeout` in pyproject.toml is for the others
END_SECONDS = 30  # that a test that has failed for this may take to come to its end
DUMP_SECONDS = 5  # that a process gets to show its stacks
ENVIRONMENT = {"PYTHONFAULTHANDLER": "1"}  # processes that tests start show their stacks when SIGABRT ends them

_stderr = pytest.StashKey[int]()


def configure(config: pytest.Config) -> None:
    """Before output is captured, and before any process is started."""
    config.stash[_stderr] = os.dup(2)
    os.environ.update(ENVIRONMENT)


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """A hook of pytest-timeout, whose own message shows threads alone, and to nobody where pytest-xdist runs tests."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None

    def late(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"it has not ended within {settings.timeout:g} s\n\n{standing(frame)}")

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.cancel_dump_traceback_later()

    item.cancel_timeout = cancel  # type: ignore[attr-defined]
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    # Where even signals change nothing, the process ends.
    after = settings.timeout + END_SECONDS
    faulthandler.dump_traceback_later(after, exit=True, file=item.config.stash[_stderr])
    return True


def standing(frame: FrameType | None) -> str:
    """Where everything is.

    Args:
        frame: frame of the thread that asks.
    """
    shown = io.StringIO()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {**sys._current_frames(), threading.get_ident(): frame}
    for number, there in frames.items():
        print(f"--- thread {names.get(number, number)}", *traceback.format_stack(there), sep="\n", file=shown)
    with suppress(RuntimeError):  # no event loop runs
        for task in asyncio.all_tasks():
            print("--- task", file=shown)
            task.print_stack(file=shown)
    for pid in descendants(os.getpid()):
        print(f"--- process {pid}: {_end_with_stacks(pid)}", file=shown)
    return shown.getvalue()


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that these have, as Linux has them."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended
            for child in map(int, path.read_text().split()):
                found += [child, *descendants(child)]
    return found


def _end_with_stacks(pid: int) -> str:
    """What a process was started with, and what it says when it is aborted."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:500]
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        if caught is None or not int(caught[1], 16) >> (signal.SIGABRT - 1) & 1:
            return f"{command}\n(it shows no stacks)"
        said = os.open(f"/proc/{pid}/fd/2", os.O_RDONLY | os.O_NONBLOCK)
        process = os.pidfd_open(pid)
    except OSError as error:
        return str(error)
    try:
        with suppress(OSError):  # of a file only what is new; a pipe holds nothing else
            os.lseek(said, 0, os.SEEK_END)
        os.kill(pid, signal.SIGABRT)
        select.select([process], [], [], DUMP_SECONDS)
        with suppress(BlockingIOError):
            return f"{command}\n{os.read(said, 2**16).decode(errors='replace')}"
        return command
    finally:
        os.close(said)
        os.close(process)
