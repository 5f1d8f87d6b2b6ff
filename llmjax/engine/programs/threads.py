"""Threads that compile in the background, and how a process ends while they do."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
NAME = "compile"


class CompileThreads:
    """Runs calls in the order in which they come, a number of them at a time.

    XLA cannot be interrupted, and a process whose threads are inside it crashes when it ends in the ordinary way. So
    calls that have not begun are dropped when they are no longer needed; the others are waited for, or ``leave`` ends
    the process.

    Args:
        count: calls at once.
    """

    def __init__(self, count: int) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [_CompileThread(self._tasks, f"{NAME}-{i}") for i in range(count)]
        # Without a call of `close`, garbage collection ends the threads, but does not wait for them: it runs in the
        # middle of anything, and what a thread has begun may need a lock that is held there.
        weakref.finalize(self, _drop, self._tasks, count).atexit = False
        atexit.unregister(_end_all)
        atexit.register(_end_all)  # the latest comes first: before JAX lets go of its devices
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Starts ``call(*arguments)`` when it is its turn; never, if this is closed."""
        future: Future[T] = Future()
        self._tasks.put((future, call, arguments))
        if self._closed:
            _drop(self._tasks, len(self._threads))
        return future

    def close(self, *, wait: bool = True) -> None:
        """Drops the calls that have not begun; a second call does nothing.

        Args:
            wait: whether to wait until those that have begun are done, and what they hold is free.
        """
        self._closed = True
        _drop(self._tasks, len(self._threads))
        if wait:
            _join(self._threads)


def leave(status: int) -> NoReturn:
    """Ends the process; at once if threads may be inside XLA, because waiting for them could take too long."""
    if any(thread.daemon and thread.name.startswith((NAME, "engine")) for thread in threading.enumerate()):
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed
                stream.flush()
        os._exit(status)
    sys.exit(status)


_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class _CompileThread(threading.Thread):
    """Calls what is in a queue until it finds None there. It does not know the object that fills the queue."""

    def __init__(self, tasks: queue.SimpleQueue[_Task | None], name: str) -> None:
        # A daemon: the interpreter waits for others before it runs any code that could drop their work.
        super().__init__(name=name, daemon=True)
        self.tasks = tasks

    def run(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            # Compiling must not slow down requests that run already on the programs that are there.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while (task := self.tasks.get()) is not None:
            future, call, arguments = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(*arguments))
                except BaseException as error:
                    future.set_exception(error)
            del task, future, call, arguments  # or they would live until the next task


def _drop(tasks: queue.SimpleQueue[_Task | None], count: int) -> None:
    """Cancels what has not begun, and lets ``count`` threads end."""
    while True:
        try:
            task = tasks.get_nowait()
        except queue.Empty:
            break
        if task is not None:
            task[0].cancel()
    for _ in range(count):
        tasks.put(None)


def _join(threads: Iterable[threading.Thread]) -> None:
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


def _end_all() -> None:
    """Runs when the interpreter ends: waits on all threads for the calls that have begun."""
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _CompileThread)]
    for thread in threads:
        _drop(thread.tasks, len(threads))  # at least as many as share its queue
    _join(threads)
