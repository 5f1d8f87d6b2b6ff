"""Compiling in the background: what is ready when, and what people read if the compiler refuses."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator

import pytest

from llmjax.engine.batch import Bucket, make_buckets
from llmjax.engine.compile_threads import CompileThreads
from llmjax.engine.programs import StepPrograms
from llmjax.errors import CompileError

BUCKETS = make_buckets(max_num_seqs=4, max_num_batched_tokens=64)
LARGEST = Bucket(tokens=64, rows=4, decode=False)


def build(refused: Collection[Bucket]) -> Callable[[Bucket], Callable[[], Bucket]]:
    """A compiler of programs that return their bucket."""

    def compiled(bucket: Bucket) -> Callable[[], Bucket]:
        if bucket in refused:
            raise ValueError("no such\ninstruction")
        return lambda: bucket

    return compiled


@pytest.fixture
def programs() -> Iterator[Callable[..., StepPrograms]]:
    made: list[CompileThreads] = []

    def make(*refused: Bucket, threads: int = 2) -> StepPrograms:
        made.append(CompileThreads(threads))
        return StepPrograms(build(refused), BUCKETS, threads=made[-1])

    yield make
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
