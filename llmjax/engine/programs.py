"""Compiled step programs, one a bucket: compiled ahead of time in threads, used as soon as one that fits is ready."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from llmjax.engine.batch import Bucket
from llmjax.engine.compile_threads import CompileThreads
from llmjax.engine.scheduler import StepPlan
from llmjax.errors import CompileError
from llmjax.host_memory import give_back

logger = logging.getLogger(__name__)

Executable = Callable[..., Any]


@dataclass(frozen=True)
class Program:
    """The compiled step of one bucket."""

    bucket: Bucket
    executable: Executable
    seconds: float  # that lowering and compiling (or reading the cache) took


class CompileCounter:
    """Counts programs that XLA compiled or read from the cache, in the whole process."""

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0
        self._closed = False
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        if event == self.EVENT:
            with self._lock:
                self.count += 1

    def close(self) -> None:
        """Stops counting; a second call does nothing."""
        if not self._closed:
            self._closed = True
            jax.monitoring.unregister_event_duration_listener(self._listen)


class StepPrograms:
    """All buckets of one model.

    Args:
        build: compiles one bucket; called in threads.
        buckets: any order; the last mixed one must hold every plan.
        threads: where they are compiled.
    """

    def __init__(
        self, build: Callable[[Bucket], Executable], buckets: list[Bucket], *, threads: CompileThreads
    ) -> None:
        self._build = build
        self._order = sorted(buckets, key=_cost)
        self._ready: list[Program] = []  # cheapest first; replaced, never changed, so that the engine reads it freely
        self._ready_lock = threading.Lock()
        # The largest bucket holds every plan, so the engine can serve as soon as it is there; then one decode and the
        # largest decode bucket; the rest from small to large.
        self._largest: Future[Program] = threads.submit(self._compile, self._order[-1])
        decode = [bucket for bucket in self._order if bucket.decode]
        smaller = list(dict.fromkeys([decode[0], decode[-1], *self._order[:-1]]))
        self._smaller = [threads.submit(self._compile_smaller, bucket) for bucket in smaller]

    @property
    def buckets(self) -> list[Bucket]:
        """All of them, cheapest first."""
        return self._order

    @property
    def ready(self) -> list[Program]:
        """The programs compiled so far, cheapest first."""
        return self._ready

    def wait_first(self) -> None:
        """Returns when every plan can be run.

        Raises:
            CompileError: no plan can, for the largest bucket does not compile.
        """
        self._largest.result()

    def wait_all(self) -> None:
        """Returns when nothing is left to compile; raises as `wait_first`."""
        self.wait_first()
        for future in self._smaller:
            future.exception()

    def pick(self, plan: StepPlan) -> Program:
        """The cheapest ready program that holds the plan."""
        fitting = next((program for program in self._ready if program.bucket.holds(plan)), None)
        return self._largest.result() if fitting is None else fitting

    def most_steps(self, rows: int) -> int:
        """Decode steps that one dispatch of so many rows may take with the programs that are ready."""
        return max((program.bucket.steps for program in self._ready if program.bucket.rows >= rows), default=1)

    def _compile(self, bucket: Bucket) -> Program:
        started = time.monotonic()
        executable = build_one(self._build, bucket)
        program = Program(bucket=bucket, executable=executable, seconds=time.monotonic() - started)
        logger.debug("compiled %s in %.1f s", bucket, program.seconds)
        with self._ready_lock:
            self._ready = sorted([*self._ready, program], key=lambda ready: _cost(ready.bucket))
        give_back()
        return program

    def _compile_smaller(self, bucket: Bucket) -> Program:
        if self._largest.done():
            self._largest.result()  # its error is this one's too
        try:
            return self._compile(bucket)
        except CompileError as error:
            self._largest.add_done_callback(partial(_warn_unless_all_failed, error))
            raise


def build_one(build: Callable[[Bucket], Executable], bucket: Bucket) -> Executable:
    """``build(bucket)``.

    Raises:
        CompileError: XLA refuses the program.
    """
    try:
        return build(bucket)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CompileError(f"the step program of {bucket} does not compile: {cause}") from error


def _warn_unless_all_failed(error: CompileError, largest: Future[Program]) -> None:
    """If the largest one fails too, its error is the only one that anybody should read."""
    if not largest.cancelled() and largest.exception() is None:
        logger.warning("%s; a larger one takes its place", error)
        logger.debug("why:", exc_info=error)


def _cost(bucket: Bucket) -> tuple[int, bool]:
    """Decode before mixed at equal size; the largest mixed bucket last."""
    return (bucket.tokens, not bucket.decode)
