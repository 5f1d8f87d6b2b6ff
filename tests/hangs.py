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
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

SLOW_SECONDS = 600  # that a slow test may take; `timeout` in pyproject.toml is for the others
LONGEST = 10  # times its limit may pass on the clock, if the machine computes other things meanwhile
IDLE_SHARE = 0.05  # of a core: a test and its processes that compute less than that stand still,
WAITING_SHARE = 0.5  # unless their threads spend this much of the time waiting for a core that others have
END_SECONDS = 30  # that a test that has failed for this may take to come to its end
DUMP_SECONDS = 5  # that a process gets to show its stacks
ENVIRONMENT = {"PYTHONFAULTHANDLER": "1"}  # processes that tests start show their stacks when SIGABRT ends them

_stderr = pytest.StashKey[int]()


def configure(config: pytest.Config) -> None:
    """Before output is captured, and before any process is started."""
    config.stash[_stderr] = os.dup(2)
    os.environ.update(ENVIRONMENT)


@dataclass
class Limit:
    """The limit of a test counts what its processes compute, so that a busy machine fails no test.

    A test is too late once it has computed for the whole limit, has stood still for the whole limit, or is `LONGEST`
    times as old as its limit.

    Args:
        seconds: the limit.
        clock: seconds on the clock.
        computed: seconds of the processors that the test and its processes have used.
        waited: seconds that their threads could have computed, and had no processor.
    """

    seconds: float
    clock: Callable[[], float]
    computed: Callable[[], float]
    waited: Callable[[], float]

    def __post_init__(self) -> None:
        self._start = self._moved = self.clock()
        self._start_computed = self._seen = self.computed()
        self._seen_waiting = self.waited()

    def too_late(self) -> str | None:
        """Why the test is too late, or None. To be asked again and again."""
        now, computed, waited = self.clock(), self.computed(), self.waited()
        passed = now - self._moved
        self._seen_waiting = min(self._seen_waiting, waited)  # what has ended takes its time out of the sums
        moves = computed < self._seen or computed - self._seen > IDLE_SHARE * passed
        if moves or waited - self._seen_waiting > WAITING_SHARE * passed:
            self._seen, self._seen_waiting, self._moved = computed, waited, now
        if computed - self._start_computed >= self.seconds:
            return f"it has not ended after {self.seconds:g} s of computing"
        if now - self._moved >= self.seconds:
            return f"it has stood still for {self.seconds:g} s"
        if now - self._start >= LONGEST * self.seconds:
            return f"it has not ended within {LONGEST * self.seconds:g} s"
        return None


def computed_seconds() -> float:
    """Seconds of the processors that this process, its descendants and those that have ended have used."""
    ticks = os.sysconf("SC_CLK_TCK")
    total = sum(os.times()[:4])
    for pid in descendants(os.getpid()):
        with suppress(OSError):  # it has ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / ticks  # utime, stime, cutime, cstime
    return total


def waited_seconds() -> float:
    """Seconds that threads of this process and of its descendants have waited for a processor, as Linux counts them."""
    total = 0
    for pid in (os.getpid(), *descendants(os.getpid())):
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # it has ended
                total += int(path.read_text().split()[1])
    return total / 1e9


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """A hook of pytest-timeout, whose own message shows threads alone, and to nobody where pytest-xdist runs tests."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None
    limit = Limit(seconds=settings.timeout, clock=time.monotonic, computed=computed_seconds, waited=waited_seconds)

    def look(number: int, frame: FrameType | None) -> None:
        end_later()
        why = limit.too_late()
        if why is not None and in_test(frame):
            signal.setitimer(signal.ITIMER_REAL, 0)
            pytest.fail(f"{why}\n\n{standing(frame)}")

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.cancel_dump_traceback_later()

    def end_later() -> None:
        """Where even signals change nothing, the process ends."""
        after = settings.timeout + END_SECONDS
        faulthandler.dump_traceback_later(after, exit=True, file=item.config.stash[_stderr])

    item.cancel_timeout = cancel  # type: ignore[attr-defined]
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout / 12, settings.timeout / 12)
    end_later()
    return True


def in_test(frame: FrameType | None) -> bool:
    """Whether a frame is of the test or of its fixtures: pytest itself, which may be telling that it has failed, would
    end all tests with an error that is raised there."""
    call = pytest.CallInfo.from_call.__func__.__code__  # type: ignore[attr-defined]
    while frame is not None and frame.f_back is not None:
        if frame.f_back.f_code is call and frame.f_code.co_name == "<lambda>":
            return True
        frame = frame.f_back
    return False


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
