"""Compiled step programs by bucket: a step takes the cheapest one that holds it and is ready."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from llmjax.engine.core.scheduler import StepPlan
from llmjax.engine.device.batch import Bucket
from llmjax.engine.programs.cache import Executable
from llmjax.engine.programs.compiler import build_one
from llmjax.engine.programs.lull import Lull
from llmjax.engine.programs.threads import CompileThreads
from llmjax.errors import CompileError
from llmjax.host_memory import give_back

logger = logging.getLogger(__name__)

T = TypeVar("T")
EMPTY: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Program:
    """The compiled step of one bucket."""

    bucket: Bucket
    executable: Executable
    seconds: float  # duration of lowering and compiling, or of reading the cache


class StepPrograms:
    """All buckets of one model.

    Programs that are kept on disk are read when a plan needs them, or while no steps run: reading takes a core and the
    interpreter for a tenth of a second each, for which running requests would wait. Only the two that one short request
    needs are read at once, in parallel with the rest of the start.

    Args:
        build: compiles or reads the program of one bucket; may be called by several threads.
        buckets: any order; the last mixed one must hold every plan.
        threads: the threads that compile them.
        kept: buckets whose programs need only to be read.
        apart: buckets that another process compiles, each with a future that is done when its program needs only to be
            read, or never will; the largest one is not among them.
        lull: waits until no steps run.
    """

    def __init__(
        self,
        build: Callable[[Bucket], Executable],
        buckets: list[Bucket],
        *,
        threads: CompileThreads,
        kept: Collection[Bucket] = (),
        apart: Mapping[Bucket, Future[None]] = EMPTY,
        lull: Lull | None = None,
    ) -> None:
        self._build = build
        self._order = sorted(buckets, key=Bucket.cost)
        self._kept = set(kept)
        self._programs: dict[Bucket, Program] = {}
        self._building = {bucket: threading.Lock() for bucket in buckets}
        self._lull = lull or Lull()
        cheapest = {bucket.decode: bucket for bucket in reversed(self._order) if not bucket.drafts}
        self._at_once = self._kept.intersection(cheapest.values())
        # Those that wait come last.
        order = sorted(in_turn(buckets), key=lambda b: b in self._kept and b not in self._at_once)
        self._largest: Future[Program] = Future()  # the others look at it, whichever comes first
        self._futures = [self._submit(bucket, threads, apart.get(bucket)) for bucket in order]
        follow(self._futures[order.index(self._order[-1])], self._largest)

    @property
    def buckets(self) -> list[Bucket]:
        """All of them, cheapest first."""
        return self._order

    @property
    def ready(self) -> list[Program]:
        """The programs compiled or read so far, cheapest first."""
        return [program for bucket in self._order if (program := self._programs.get(bucket)) is not None]

    def wait_first(self) -> None:
        """Returns when every plan can be run.

        Raises:
            CompileError: no plan can, because the largest bucket does not compile.
        """
        if self._order[-1] not in self._kept:
            self._largest.result()

    def wait_all(self) -> None:
        """Returns when nothing is left to compile or to read; raises as `wait_first`."""
        self._lull.end()
        self._largest.result()
        for future in self._futures:
            future.exception()

    def pick(self, plan: StepPlan, *, usable: Callable[[Bucket], bool] | None = None) -> Program:
        """The cheapest program that holds the plan, of those that are ready or need only to be read.

        Args:
            usable: whether a bucket can be taken; the largest one always is. None: all can.
        """
        self._lull.step()
        for bucket in self._order:
            if (
                bucket.holds(plan)
                and (usable is None or usable(bucket))
                and (program := self._at_hand(bucket)) is not None
            ):
                return program
        return self._largest.result()

    def most_steps(self, rows: int) -> int:
        """Decode steps that one dispatch of this many rows may take with the programs that there are."""
        return self._most(lambda bucket: bucket.steps, rows, least=1)

    def most_drafts(self, rows: int) -> int:
        """Drafts that each of this many rows may have with the programs that there are."""
        return self._most(lambda bucket: bucket.drafts, rows, least=0)

    def _most(self, number: Callable[[Bucket], int], rows: int, *, least: int) -> int:
        """The largest number of a bucket that is there for this many rows, whether they have adapters or not."""
        there = [b for b in self._order if b.rows >= rows and (b in self._programs or b in self._kept)]
        families = {bucket.adapters for bucket in self._order}
        return min(max((number(b) for b in there if b.adapters == own), default=least) for own in families)

    def _at_hand(self, bucket: Bucket) -> Program | None:
        program = self._programs.get(bucket)
        if program is None and bucket in self._kept:
            try:
                program = self._compile(bucket)
            except CompileError as error:
                self._kept.discard(bucket)
                logger.warning("%s; a larger one takes its place", error)
        return program

    def _compile(self, bucket: Bucket) -> Program:
        """Compiles or reads a program, only once even if it is asked for more often."""
        with self._building[bucket]:
            if (there := self._programs.get(bucket)) is not None:
                return there
            started = time.monotonic()
            executable = build_one(self._build, bucket)
            program = Program(bucket=bucket, executable=executable, seconds=time.monotonic() - started)
            logger.debug("compiled %s in %.1f s", bucket, program.seconds)
            self._programs[bucket] = program
        if bucket not in self._kept:
            give_back()
        return program

    def _submit(self, bucket: Bucket, threads: CompileThreads, kept: Future[None] | None) -> Future[Program]:
        """Has a program compiled here, or read once the other process that compiles it is done."""
        if kept is None:
            return threads.submit(self._compile_in_turn, bucket)
        program: Future[Program] = Future()

        def begin(kept: Future[None]) -> None:
            if kept.cancelled():
                program.cancel()
                return
            if kept.exception() is None:
                self._kept.add(bucket)
            follow(threads.submit(self._compile_in_turn, bucket), program)

        kept.add_done_callback(begin)
        return program

    def _compile_in_turn(self, bucket: Bucket) -> Program:
        if bucket in self._kept and bucket not in self._at_once:
            self._lull.wait()
        if bucket == self._order[-1]:
            return self._compile(bucket)
        if self._largest.done():
            self._largest.result()  # its error is this program's too
        try:
            return self._compile(bucket)
        except CompileError as error:
            # If the largest one, which threads took before this one, fails too, nobody should read of any other. One
            # that is kept comes after this one, and is not waited for.
            if self._order[-1] in self._kept or self._largest.exception() is None:
                logger.warning("%s; a larger one takes its place", error)
                logger.debug("why:", exc_info=error)
            raise


def in_turn(buckets: Collection[Bucket]) -> list[Bucket]:
    """The order to compile in: the largest bucket holds every plan, so the engine can serve as soon as it is there;
    then one decode and the largest decode bucket; the rest from small to large, and those with drafts last, since all
    goes on without them."""
    *smaller, largest = sorted(buckets, key=lambda bucket: (not bucket.drafts, bucket.cost()))
    smaller.sort(key=lambda bucket: bool(bucket.drafts))
    decode = [bucket for bucket in smaller if bucket.decode]
    return list(dict.fromkeys([largest, *decode[:1], *decode[-1:], *smaller]))


def follow(first: Future[T], second: Future[T]) -> None:
    """Has the second future end as the first one does."""

    def end(first: Future[T]) -> None:
        if first.cancelled():
            second.cancel()
        elif (error := first.exception()) is not None:
            second.set_exception(error)
        else:
            second.set_result(first.result())

    first.add_done_callback(end)
