"""Compiling in the background: which programs are ready when, and the messages if the compiler refuses one."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError, Future, wait
from types import SimpleNamespace
from typing import Any

import pytest

from llmjax.engine.device.batch import Bucket, make_buckets
from llmjax.engine.programs.lull import QUIET, Lull
from llmjax.engine.programs.step_programs import StepPrograms
from llmjax.engine.programs.threads import CompileThreads
from llmjax.errors import CompileError
from tests.waiting import until

pytestmark = pytest.mark.jax_api

BUCKETS = make_buckets(max_num_seqs=4, max_num_batched_tokens=64)
LARGEST = Bucket(tokens=64, rows=4, decode=False)


def build(refused: Collection[Bucket], built: list[Bucket]) -> Callable[[Bucket], Callable[[], Bucket]]:
    """A compiler of programs that return their bucket; notes what it was asked for."""

    def compiled(bucket: Bucket) -> Callable[[], Bucket]:
        built.append(bucket)
        if bucket in refused:
            raise ValueError("no such\ninstruction")
        return lambda: bucket

    return compiled


@pytest.fixture
def programs() -> Iterator[Callable[..., StepPrograms]]:
    made: list[CompileThreads] = []

    def make(
        *refused: Bucket,
        threads: int = 2,
        kept: Collection[Bucket] = (),
        built: list[Bucket] | None = None,
        clock: Callable[[], float] = lambda: 0.0,  # steps have just been made, for ever
    ) -> StepPrograms:
        made.append(CompileThreads(threads))
        built = [] if built is None else built
        lulls.append(Lull(clock=clock))
        return StepPrograms(build(refused, built), BUCKETS, threads=made[-1], kept=kept, lull=lulls[-1])

    lulls: list[Lull] = []
    yield make
    for lull in lulls:
        lull.end()
    for threads in made:
        threads.close()


def test_all_buckets_compile_and_the_cheapest_come_first(programs: Callable[..., StepPrograms]) -> None:
    before = sys.getswitchinterval()
    made = programs()
    made.wait_all()
    assert sys.getswitchinterval() == before  # it is the whole process's
    assert [program.bucket for program in made.ready] == made.buckets
    assert made.buckets[-1] == LARGEST and made.buckets[0] == Bucket(tokens=1, rows=1, decode=True)
    assert all(program.executable() == program.bucket for program in made.ready)


def test_a_smaller_bucket_that_does_not_compile_is_a_line_and_nothing_more(
    programs: Callable[..., StepPrograms], caplog: pytest.LogCaptureFixture
) -> None:
    refused = Bucket(tokens=2, rows=2, decode=True)
    made = programs(refused)
    made.wait_all()
    assert {program.bucket for program in made.ready} == {*BUCKETS} - {refused}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.exc_info is None
    assert record.getMessage() == (
        f"the step program of {refused} does not compile: ValueError: no such; a larger one takes its place"
    )


@pytest.mark.parametrize("threads", [1, 8])
def test_if_no_bucket_compiles_there_is_one_error(
    programs: Callable[..., StepPrograms], caplog: pytest.LogCaptureFixture, threads: int
) -> None:
    made = programs(*BUCKETS, threads=threads)
    with pytest.raises(CompileError, match=r"program of Bucket\(tokens=64, .* does not compile: ValueError: no such$"):
        made.wait_first()
    with pytest.raises(CompileError, match="tokens=64"):
        made.wait_all()
    assert made.ready == [] and caplog.records == []


def plan(tokens: int) -> Any:
    """What programs look at of a plan: a prompt's chunk."""
    return SimpleNamespace(
        steps=1, decode_only=False, drafts=0, spans=False, adapters=False, num_tokens=tokens, rows=[None]
    )


def mixed(tokens: int) -> Bucket:
    return Bucket(tokens=tokens, rows=4, decode=False)


FIRST = {Bucket(tokens=1, rows=1, decode=True), mixed(16)}  # what one short request needs


def test_what_is_kept_is_read_when_a_plan_wants_it(programs: Callable[..., StepPrograms]) -> None:
    built: list[Bucket] = []
    made = programs(kept=BUCKETS, built=built)
    made.wait_first()  # nothing to wait for
    assert made.most_steps(4) == 1
    assert made.pick(plan(20)).bucket == mixed(32)
    assert made.pick(plan(17)).bucket == mixed(32)
    assert made.pick(plan(1)).bucket == mixed(16)
    until(lambda: len(made.ready) == 3)
    assert sorted(map(str, built)) == sorted(map(str, [*FIRST, mixed(32)]))
    assert {program.bucket for program in made.ready} == {*FIRST, mixed(32)}
    made.wait_all()
    assert sorted(map(str, built)) == sorted(map(str, BUCKETS))  # each once
    assert [program.bucket for program in made.ready] == made.buckets


def test_what_a_short_request_needs_has_no_drafts() -> None:
    buckets = make_buckets(max_num_seqs=4, max_num_batched_tokens=64, drafts=4, drafted_rows=2)
    assert any(bucket.drafts and bucket.tokens < 16 for bucket in buckets)
    threads = CompileThreads(2)
    made = StepPrograms(build((), []), buckets, threads=threads, kept=buckets)
    assert made._at_once == FIRST
    threads.close()


def test_the_rest_is_read_while_nobody_computes_anything(
    programs: Callable[..., StepPrograms], monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet, now = 0.01, 0.0
    monkeypatch.setattr("llmjax.engine.programs.lull.QUIET", quiet)
    built: list[Bucket] = []
    made = programs(kept=BUCKETS, built=built, clock=lambda: now)
    until(lambda: set(built) == FIRST)
    now = 0.9 * quiet
    made.pick(plan(1))
    now = 1.8 * quiet  # less than that since the pick
    made.pick(plan(1))
    assert set(built) == FIRST
    now = 2.9 * quiet
    for future in made._futures:  # without a word to hurry up
        future.result()
    assert len(built) == len(BUCKETS)


def test_what_is_not_kept_is_compiled_at_once(programs: Callable[..., StepPrograms]) -> None:
    built: list[Bucket] = []
    kept = {LARGEST, mixed(32)}
    made = programs(kept=kept, built=built, threads=1)
    until(lambda: len(built) == len(BUCKETS) - len(kept))
    made.pick(plan(60))
    assert mixed(32) not in built
    assert made.pick(plan(20)).bucket == mixed(32)


def test_a_largest_one_that_is_kept_is_not_waited_for(
    programs: Callable[..., StepPrograms], caplog: pytest.LogCaptureFixture
) -> None:
    """With one thread it comes after the one that does not compile."""
    made = programs(mixed(16), kept={LARGEST}, threads=1, clock=itertools.count(step=2 * QUIET).__next__)
    wait(made._futures)
    assert {program.bucket for program in made.ready} == {*BUCKETS} - {mixed(16)}
    assert [record.getMessage() for record in caplog.records if "tokens=16" in record.getMessage()]


def test_a_file_that_turns_out_not_to_compile_is_a_line(
    programs: Callable[..., StepPrograms], caplog: pytest.LogCaptureFixture
) -> None:
    made = programs(mixed(16), kept=BUCKETS)
    assert made.pick(plan(1)).bucket == mixed(32)
    assert made.pick(plan(1)).bucket == mixed(32)
    (record,) = caplog.records
    assert "tokens=16" in record.getMessage() and record.getMessage().endswith("a larger one takes its place")


def test_whoever_waits_for_the_largest_is_told_when_it_is_given_up() -> None:
    began, go_on = threading.Event(), threading.Event()
    threads = CompileThreads(1)
    threads.submit(lambda: (began.set(), go_on.wait()))
    began.wait()
    made = StepPrograms(build((), []), BUCKETS, threads=threads)
    threads.close(wait=False)
    with pytest.raises(CancelledError):
        made.wait_first()
    go_on.set()


@pytest.mark.parametrize("how", ["kept", "failed", "cancelled"])
def test_what_another_process_compiles(how: str) -> None:
    """A program is then read like a kept one, or compiled here after all; if it is canceled, it is not compiled."""
    apart: dict[Bucket, Future[None]] = {bucket: Future() for bucket in BUCKETS if bucket != LARGEST}
    built: list[Bucket] = []
    threads = CompileThreads(2)
    made = StepPrograms(build((), built), BUCKETS, threads=threads, apart=apart)
    made.wait_first()
    assert made.pick(plan(1)).bucket == LARGEST and built == [LARGEST]
    assert made.most_steps(1) == 1
    for future in apart.values():
        if how == "kept":
            future.set_result(None)
        elif how == "failed":
            future.set_exception(CompileError("its process was killed"))
        else:
            future.cancel()
    if how == "kept":
        assert made.pick(plan(1)).bucket == mixed(16)  # read at once, because it is wanted
    if how == "cancelled":
        with pytest.raises(CancelledError):
            made.wait_all()
    else:
        made.wait_all()
    assert sorted(built, key=str) == sorted(BUCKETS if how != "cancelled" else [LARGEST], key=str)
    assert len(made.ready) == len(built)
    threads.close()
