"""The programs that sample behind a step where the host has to say first which tokens are allowed."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from llmjax.engine.batch import Bucket
from llmjax.engine.compile_threads import CompileThreads
from llmjax.engine.program_cache import Executable
from llmjax.engine.programs import StepCompiler

_Kind = tuple[int, bool]  # rows of a bucket, and whether it is of the decode family


class MaskedPrograms:
    """One for each number of rows. That of mixed steps, which hold every plan, is compiled at the start; the others
    once a request wants masks.

    Args:
        compiler: of the steps that they follow.
        threads: where they are compiled.
    """

    def __init__(self, compiler: StepCompiler, threads: CompileThreads) -> None:
        self._compiler = compiler
        self._threads = threads
        self._lock = threading.Lock()
        self._first = _kind(compiler.largest)
        self._programs: dict[_Kind, Future[Executable]] = {}
        self._submit(compiler.largest)

    def prepare(self) -> None:
        """Begins to compile all of them; a second time does nothing."""
        with self._lock:
            for bucket in self._compiler.layouts:
                if _kind(bucket) not in self._programs:
                    self._submit(bucket)

    def wait_first(self) -> None:
        """Returns when every plan can be sampled."""
        self._programs[self._first].result()

    def wait_all(self) -> None:
        """Returns when nothing is left to compile."""
        self.prepare()
        for future in list(self._programs.values()):
            future.exception()

    def ready(self, bucket: Bucket) -> bool:
        """Whether a step of the bucket can be sampled without waiting."""
        future = self._programs.get(_kind(bucket))
        return future is not None and future.done() and future.exception() is None

    def program(self, bucket: Bucket) -> Executable:
        """The one for a bucket, which is `ready` or the largest."""
        return self._programs[_kind(bucket)].result()

    def _submit(self, bucket: Bucket) -> None:
        self._programs[_kind(bucket)] = self._threads.submit(self._compiler.compile_masked, bucket)


def _kind(bucket: Bucket) -> _Kind:
    return bucket.rows, bucket.decode
