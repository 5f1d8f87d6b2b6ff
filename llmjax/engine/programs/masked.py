"""The programs that sample under masks, after a step and once the host has made the masks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from llmjax.engine.device.batch import Bucket
from llmjax.engine.programs.cache import Executable
from llmjax.engine.programs.compiler import StepCompiler, build_one
from llmjax.engine.programs.threads import CompileThreads

_Kind = tuple[int, bool]  # rows of a bucket, and whether it is of the decode family


class MaskedPrograms:
    """A program for each number of rows. The program for mixed steps, which hold every plan, is compiled after all
    steps; or at once, with the others, when a request needs masks.

    They have their own thread, because the other threads may be waiting to read programs that are kept.

    Args:
        compiler: knows the buckets.
        build: compiles or reads the program for a bucket.
        threads: the threads that compile steps.
        kept: done when another process may have compiled the program for mixed steps; None: no other compiles it.
    """

    def __init__(
        self,
        compiler: StepCompiler,
        build: Callable[[Bucket], Executable],
        *,
        threads: CompileThreads,
        kept: Future[None] | None = None,
    ) -> None:
        self._compiler = compiler
        self._build = build
        self._threads = CompileThreads(1)
        self._lock = threading.Lock()
        self._programs: dict[_Kind, Future[Executable]] = {}
        if kept is not None:
            kept.add_done_callback(lambda done: None if done.cancelled() else self._submit(compiler.largest))
        elif compiler.generates:
            threads.submit(self._submit, compiler.largest)

    def prepare(self) -> None:
        """Begins to compile all of them; a second time does nothing."""
        for bucket in (self._compiler.largest, *self._compiler.layouts):
            if not bucket.drafts:
                self._submit(bucket)

    def can_sample(self, *, seconds: float = 0.0) -> bool:
        """Whether every plan can be sampled.

        Args:
            seconds: how long to wait for that, if it was prepared.

        Raises:
            CompileError: a plan never can.
        """
        future = self._programs.get(_kind(self._compiler.largest))
        if future is None or (not future.done() and not wait([future], timeout=seconds).done):
            return False
        future.result()
        return True

    def wait_all(self) -> None:
        """Returns when nothing is left to compile.

        Raises:
            CompileError: masks cannot be used.
        """
        if not self._compiler.generates:
            return
        self.prepare()
        for future in list(self._programs.values()):
            future.exception()
        self.can_sample()

    def ready(self, bucket: Bucket) -> bool:
        """Whether a step of the bucket can be sampled without waiting."""
        future = self._programs.get(_kind(bucket))
        return future is not None and future.done() and future.exception() is None

    def close(self, *, wait: bool = True) -> None:
        """Stops compiling, as `CompileThreads.close` does."""
        self._threads.close(wait=wait)

    def _submit(self, bucket: Bucket) -> None:
        with self._lock:
            if _kind(bucket) not in self._programs:
                self._programs[_kind(bucket)] = self._threads.submit(build_one, self._build, bucket)


def _kind(bucket: Bucket) -> _Kind:
    return bucket.rows, bucket.decode
