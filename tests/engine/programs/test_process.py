"""Programs that another process compiles are found as if this one had compiled them, and the engine survives whatever
happens to that process."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.engine.device.rows import write_pages
from llmjax.engine.programs import process as compile_process
from llmjax.engine.programs.cache import ProgramCache, ProgramSpec
from llmjax.engine.programs.process import CompileProcess
from llmjax.errors import CompileError
from tests.checkpoints import GOLDEN
from tests.waiting import until_ended

pytestmark = pytest.mark.jax_api

LLAMA = GOLDEN / "llama"
LONG = 300  # seconds that a process may take on a machine that is busy


def spec(pages: int) -> ProgramSpec:
    """A small program, of the engine's own: another process has to find the function."""
    device = jax.devices("cpu")[0]
    place = jax.sharding.SingleDeviceSharding(device)
    tables = jax.ShapeDtypeStruct((1, 2, pages), jnp.int32, sharding=place)
    changes = jax.ShapeDtypeStruct((4,), jnp.int32)
    return ProgramSpec(
        function=write_pages,
        arguments=(tables, changes, changes),
        device=device,
        donated=(0,),
        options=MappingProxyType({}),
    )


@pytest.fixture
def cache(tmp_path: Path) -> ProgramCache:
    return ProgramCache.of(tmp_path, jax.devices("cpu")[0])


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ProgramSpec]]:
    """The programs that this process has traced and lowered."""
    found: list[ProgramSpec] = []
    lower = ProgramSpec.lower

    def noted(self: ProgramSpec, name: str) -> Any:
        if self.function is write_pages:  # an engine of an earlier test may still compile steps
            found.append(self)
        return lower(self, name)

    monkeypatch.setattr(ProgramSpec, "lower", noted)
    yield found


def said(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What the module says in the log; engines of earlier tests may still say something else."""
    return [record for record in caplog.records if record.name == compile_process.__name__]


def test_what_it_has_compiled_is_read(cache: ProgramCache, lowered: list[ProgramSpec]) -> None:
    specs = {pages: spec(pages) for pages in (3, 5)}
    process = CompileProcess(cache, specs)
    for pages, wanted in specs.items():
        process.programs[pages].result(LONG)
        assert cache.has(wanted)
        changes = np.arange(4, dtype=np.int32)
        written = cache.get(wanted)(jnp.zeros((1, 2, pages), jnp.int32), changes, changes + 7)
        np.testing.assert_array_equal(np.asarray(written).ravel()[:4], changes + 7)
    assert not lowered
    process.close()


def test_programs_of_a_process_that_is_killed_are_said_to_be_left(
    cache: ProgramCache, caplog: pytest.LogCaptureFixture
) -> None:
    process = CompileProcess(cache, {pages: spec(pages) for pages in (3, 5)})
    os.kill(process.pid, signal.SIGKILL)
    for program in process.programs.values():
        with pytest.raises(CompileError, match="killed by SIGKILL"):
            program.result(LONG)
    (record,) = said(caplog)
    assert record.levelno == logging.WARNING and "the engine compiles 2 of them itself" in record.getMessage()
    process.close()


def test_one_that_ends_before_it_is_told_anything_leaves_no_traceback(
    cache: ProgramCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised, start = [], subprocess.Popen

    def ended(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        process = start([sys.executable, "-c", ""], **how)
        process.wait()
        return process

    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setattr(subprocess, "Popen", ended)
    monkeypatch.setattr(compile_process.jax_settings, "of_programs", dict)  # so little that a buffer keeps it
    process = CompileProcess(cache, {"one": spec(3)})
    with pytest.raises(CompileError, match="ended with status 0"):
        process.programs["one"].result(LONG)
    for thread in threading.enumerate():
        if thread.name == "compile-process":
            thread.join(LONG)
    assert not raised
    process.close()


def test_a_program_that_xla_refuses_is_told(cache: ProgramCache, caplog: pytest.LogCaptureFixture) -> None:
    wrong = ProgramSpec(function=write_pages, arguments=(), device=jax.devices("cpu")[0])
    process = CompileProcess(cache, {"wrong": wrong, "right": spec(3)})
    with pytest.raises(CompileError, match="TypeError"):
        process.programs["wrong"].result(LONG)
    process.programs["right"].result(LONG)
    assert not said(caplog)
    process.close()


def test_a_process_of_another_environment_compiles_nothing(tmp_path: Path) -> None:
    """The programs that it would keep would not be found."""
    process = CompileProcess(ProgramCache(tmp_path / "programs" / "other"), {"one": spec(3)})
    with pytest.raises(CompileError, match="ended with status 1"):
        process.programs["one"].result(LONG)
    process.close()


def test_a_closed_one_cancels_what_is_left(cache: ProgramCache, caplog: pytest.LogCaptureFixture) -> None:
    process = CompileProcess(cache, {"one": spec(3)})
    process.close()
    process.close()
    with pytest.raises(CancelledError):
        process.programs["one"].result(LONG)
    assert not Path(f"/proc/{process.pid}").exists() and not said(caplog)


ENGINE = """
import json, os, sys
from llmjax.engine.device import runner
from llmjax.engine.programs.cache import ProgramSpec
runner.WORTH_A_PROCESS = 0
lowered, lower = [], ProgramSpec.lower
def noted(self, name):
    layout = self.static.get("layout")
    if layout is not None:
        lowered.append(layout.bucket.tokens)
    return lower(self, name)
ProgramSpec.lower = noted
from llmjax import LLM, SamplingParams
llm = LLM(
    sys.argv[1], dtype="float32", page_size=4, max_num_seqs=2, max_num_batched_tokens=32,
    kv_cache_memory_bytes=2**20, skip_tokenizer_init=True, compilation_cache_dir=sys.argv[2],
)
apart = llm.engine.runner._apart
if sys.argv[3] == "killed":
    os.kill(apart.pid, 9)
elif sys.argv[3] == "left":
    print(apart.pid, flush=True)
    os.kill(os.getpid(), 9)
llm.warm_up()
params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
outputs = llm.generate([[5, 6], [7] * 9], params, use_tqdm=False)
programs = llm.engine.runner.programs
there = len(programs.ready) == len(programs.buckets)
llm.close()
print(json.dumps({
    "lowered": lowered, "there": there, "buckets": len(programs.buckets),
    "tokens": [output.outputs[0].token_ids for output in outputs],
}))
"""


def engine(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ENGINE, str(LLAMA), str(folder), how]
    return subprocess.run(command, capture_output=True, text=True, timeout=LONG)


@pytest.mark.slow
def test_a_cold_engine_traces_the_steps_that_it_begins_with_and_no_others(tmp_path: Path) -> None:
    found = {}
    for how in ("whole", "killed"):
        done = engine(tmp_path / how, how)
        assert done.returncode == 0, done.stderr
        found[how] = json.loads(done.stdout.splitlines()[-1])
        assert found[how]["there"] and found[how]["buckets"] > 3
        assert ("itself, beside requests" in done.stderr) == (how == "killed")
    assert sorted(found["whole"]["lowered"]) == [1, 32]  # a single decode, and what holds every plan
    assert len(found["killed"]["lowered"]) == found["killed"]["buckets"]
    assert found["killed"]["tokens"] == found["whole"]["tokens"]


@pytest.mark.skipif(not Path("/proc").exists(), reason="shows processes")
@pytest.mark.slow
def test_it_ends_with_its_engine(tmp_path: Path) -> None:
    """The process ends even if the engine is killed."""
    done = engine(tmp_path, "left")
    assert done.returncode == -signal.SIGKILL
    until_ended(int(done.stdout.split()[0]))
