"""An engine in its own process: it returns what an engine on a thread returns, and reports however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmjax import LLM, AsyncLLM, SamplingParams
from llmjax.checkpoint import GGUFFile
from llmjax.config import EngineConfig
from llmjax.engine.clients.process import ProcessEngine, exit_code
from llmjax.engine.clients.wire import Channel, Failed, Failure, Ready, ToEngine
from llmjax.engine.core.stats import HostTime, RequestStats, StepStats
from llmjax.engine.info import EngineInfo
from llmjax.engine.setup import tokenizer_of
from llmjax.errors import CheckpointError, ConfigError, EngineDead, TokenizerError
from llmjax.machine_share import MachineShare
from llmjax.outputs import RequestOutput
from llmjax.sampling.params import RequestOutputKind
from llmjax.tokenizer import Tokenizer
from tests.checkpoints import GOLDEN
from tests.waiting import until_async, until_ended

LLAMA = GOLDEN / "llama"
CHARACTERS = Path(__file__).parents[1] / "golden" / "characters"
LONG_CONTEXT = 4096
FOREVER = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


@pytest.fixture(scope="module")
def config(compile_cache_dir: str) -> EngineConfig:
    return EngineConfig(
        model=str(LLAMA),
        tokenizer=str(CHARACTERS),
        dtype="float32",
        hf_overrides={"max_position_embeddings": LONG_CONTEXT},
        page_size=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=280 * 64 * 384,
        decode_steps=1,
        compilation_cache_dir=compile_cache_dir,
        compile_threads=1,
        disable_log_stats=True,
        engine_process="process",
    )


@pytest.fixture(scope="module")
def shared(config: EngineConfig) -> Iterator[AsyncLLM]:
    engine = AsyncLLM.from_config(config)
    yield engine
    engine.client.close()


@pytest.fixture
async def engine(shared: AsyncLLM) -> AsyncIterator[AsyncLLM]:
    """One process for all tests that leave it alive and idle."""
    yield shared
    await until_async(lambda: shared.num_requests == 0 and shared.kv_stats().used == 0)
    shared.check_health()
    assert shared.exit_status == 0


@pytest.fixture(scope="module")
def offline(config: EngineConfig) -> Iterator[LLM]:
    llm = LLM.from_config(config.replace(engine_process="auto"))
    yield llm
    llm.close()


async def collect(engine: AsyncLLM, prompt: Any, params: SamplingParams, name: str) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, name)]


def process_of(engine: AsyncLLM) -> ProcessEngine:
    assert isinstance(engine.client, ProcessEngine)
    return engine.client


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Recorder:
    """A ``StatLogger`` that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.requests: list[RequestStats] = []

    def record_step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def record_request(self, stats: RequestStats) -> None:
        self.requests.append(stats)

    def record_rejection(self, reason: str) -> None: ...


REQUESTS: list[tuple[Any, SamplingParams]] = [
    ("Hello", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)),
    ([5, 6, 7] * 30, SamplingParams(temperature=1.2, seed=5, n=3, max_tokens=9, ignore_eos=True, logprobs=2)),
    ("a prompt", SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=1, logprobs=0, ignore_eos=True)),
    ([9], SamplingParams(seed=2, min_tokens=3, max_tokens=9, stop_token_ids=[60], allowed_token_ids=range(40, 70))),
    ({"prompt": "Hello", "cache_salt": "\ud800"}, SamplingParams(seed=1, max_tokens=9, logit_bias={9: 3.0})),
]


async def test_it_says_and_counts_what_an_engine_here_does(engine: AsyncLLM, offline: LLM) -> None:
    """Requests run one after the other, so that both engines compute the same steps."""
    offline.warm_up()
    await engine.warm_up()
    here, there = Recorder(), Recorder()
    offline.add_stat_logger(here)
    engine.add_stat_logger(there)
    for i, (prompt, params) in enumerate(REQUESTS):
        (expected,) = offline.generate([prompt], params, use_tqdm=False)
        found = (await collect(engine, prompt, params, str(i)))[-1]
        assert replace(found, request_id="", metrics=None) == replace(expected, request_id="", metrics=None)
        assert found.metrics is not None and found.metrics.first_token_time is not None
        assert found.metrics.arrival_time < found.metrics.first_token_time <= time.monotonic()
        # The step that brings a request's last token is not its last: one more is read, and says who runs then.
        await until_async(lambda: len(there.steps) == len(here.steps))
    timeless = {"host": HostTime(), "step_seconds": 0, "time_to_first_tokens": [], "inter_token_latencies": []}
    assert [replace(step, **timeless, compilations=0) for step in there.steps] == [
        replace(step, **timeless, compilations=0) for step in here.steps
    ]
    for mine, its in zip(here.steps, there.steps, strict=True):
        assert len(mine.time_to_first_tokens) == len(its.time_to_first_tokens)
        assert len(mine.inter_token_latencies) == len(its.inter_token_latencies)
    counts = ("finish_reason", "num_prompt_tokens", "num_generation_tokens", "num_cached_tokens", "n", "max_tokens")
    assert [[getattr(r, name) for name in counts] for r in there.requests] == [
        [getattr(r, name) for name in counts] for r in here.requests
    ]
    assert engine.stats.generation_tokens == offline.stats.generation_tokens
    assert engine.kv_stats() == offline.kv_stats()
    assert replace(engine.info, load_seconds=0) == replace(offline.info, load_seconds=0)
    programs = await engine.programs()
    assert [(p.decode, p.tokens) for p in programs] == [(True, 1), (True, 2), (True, 4), (False, 16)]
    assert all(p.seconds is not None for p in programs)
    await engine.reset_prefix_cache()
    assert engine.kv_stats().cached == 0


async def test_stop_strings_and_bad_words(engine: AsyncLLM, offline: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    text = offline.generate(["Hello"], params, use_tqdm=False)[0].outputs[0].text
    params = params.clone(stop=[text[7:9]], bad_words=[text[1]])
    (expected,) = offline.generate(["Hello"], params, use_tqdm=False)
    found = (await collect(engine, "Hello", params, "r"))[-1]
    assert text[1] not in expected.outputs[0].text
    assert replace(found, request_id="", metrics=None) == replace(expected, request_id="", metrics=None)


async def test_requests_that_wait_and_requests_that_run_can_be_aborted(engine: AsyncLLM) -> None:
    tasks = [asyncio.create_task(collect(engine, [5 + i], FOREVER, str(i))) for i in range(6)]
    recorder = Recorder()
    engine.add_stat_logger(recorder)
    await until_async(lambda: bool(recorder.steps) and recorder.steps[-1].num_waiting == 2)
    assert engine.num_waiting == 2
    await engine.abort("5")
    waiting = await asyncio.wait_for(tasks[5], 60)
    assert [part.finish_reason for part in waiting[-1].outputs] == ["abort"] and waiting[-1].finished
    await engine.abort("0")
    assert (await asyncio.wait_for(tasks[0], 60))[-1].outputs[0].finish_reason == "abort"
    tasks[1].cancel()
    for i in (2, 3, 4):
        await engine.abort(str(i))
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)


async def test_terminals_and_supervisors_signal_it_in_vain(engine: AsyncLLM) -> None:
    pid = process_of(engine).pid
    for ignored in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, ignored)
    assert (await collect(engine, [5], FOREVER.clone(max_tokens=2), "after"))[-1].finished


async def test_one_that_hangs_is_noticed_and_one_that_is_killed_ends_every_stream(
    config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    started, others = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def with_another(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Another process that has the connection too, as if threads of the engine's process were not ending."""
        others.append(started(["sleep", "600"], pass_fds=options["pass_fds"]))
        return started(command, **options)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", with_another)
        client = ProcessEngine(config)
    engine = AsyncLLM.from_config(config, client)
    tasks = [asyncio.create_task(collect(engine, [5], FOREVER, str(i))) for i in range(6)]
    await until_async(lambda: engine.stats.generation_tokens > 4)
    os.kill(client.pid, signal.SIGSTOP)
    engine.check_health()  # it does not answer this
    monkeypatch.setattr("llmjax.engine.clients.client.STUCK_AFTER", 0.01)
    with pytest.raises(EngineDead, match="in one step"):
        while True:
            await asyncio.sleep(0.01)
            engine.check_health()
    monkeypatch.undo()
    with caplog.at_level(logging.ERROR):
        os.kill(client.pid, signal.SIGCONT)  # it may say where they stand
        await until_async(lambda: "process_main.py" in caplog.text)
    os.kill(client.pid, signal.SIGSTOP)
    engine.check_health()
    question = asyncio.create_task(engine.programs())
    await asyncio.sleep(0)
    os.kill(client.pid, signal.SIGKILL)

    with caplog.at_level(logging.ERROR):
        *ends, unanswered = await asyncio.wait_for(asyncio.gather(*tasks, question, return_exceptions=True), 60)
    (other,) = others
    other.kill()
    other.wait()
    assert [type(end) for end in ends] == [EngineDead] * 6
    assert str(ends[0]) == "the engine stopped: its process was killed by SIGKILL (out of memory?)"
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    hang, *stacks, end = errors
    assert hang.endswith("its threads are shown") and end == str(ends[0])
    assert all(stack.startswith("thread ") for stack in stacks)
    assert "llmjax.engine.loading.memory" in {
        record.name for record in caplog.records
    }  # a warning that was made over there
    assert isinstance(unanswered, EngineDead)
    for call in (engine.check_health, engine.kv_stats):
        with pytest.raises(EngineDead):
            call()
    with pytest.raises(EngineDead, match="killed by SIGKILL"):
        await collect(engine, [5], FOREVER, "late")
    assert engine.exit_status == 128 + signal.SIGKILL
    await engine.shutdown()
    await engine.shutdown()
    assert engine.num_requests == 0 and not alive(client.pid)


HOLDS_THE_LOCK = """
import ctypes, signal
signal.signal(signal.SIGUSR2, lambda number, frame: ctypes.PyDLL(None).sleep(600))
"""


async def test_one_that_holds_the_interpreters_lock_shows_where_it_does(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOLDS_THE_LOCK)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        client = ProcessEngine(config)
    engine = AsyncLLM.from_config(config, client)
    os.kill(client.pid, signal.SIGUSR2)
    monkeypatch.setattr("llmjax.engine.clients.client.STUCK_AFTER", 0.01)
    monkeypatch.setattr("llmjax.engine.clients.process.HEARD_AFTER", 0.5)
    shown = ""

    def written() -> bool:
        nonlocal shown
        with contextlib.suppress(EngineDead):
            engine.check_health()
        shown += capfd.readouterr().err
        return "sitecustomize.py" in shown and "process_main.py" in shown

    await until_async(written)
    client.kill()
    await engine.shutdown()


@pytest.mark.skipif(sys.platform != "linux", reason="it is for Linux")
@pytest.mark.parametrize(("end", "code"), [("os.kill(os.getpid(), signal.SIGKILL)", -9), ("os._exit(3)", 3)])
def test_what_a_process_ends_by_is_known_before_it_has_ended(
    end: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = subprocess.Popen([sys.executable, "-c", f"import os, signal; {end}"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with monkeypatch.context() as patch:
        patch.setattr(process, "poll", lambda: None)
        patch.setattr(process, "wait", lambda: pytest.fail("it waits"))
        assert exit_code(process) == code
    process.wait()


def test_one_that_says_why_it_ends_is_dead_before_it_has_ended(
    shared: AsyncLLM, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may have much memory to free first."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sleep", "600"])
    monkeypatch.setattr("llmjax.engine.clients.process._start_process", lambda: (ours, process))
    client, died = ProcessEngine(config), Future[BaseException]()
    channel = Channel(theirs, ToEngine)
    with theirs:
        channel.send(Ready(shared.info))
        assert client.wait_loaded() == shared.info
        client.start(deliver=lambda outputs: None, died=died.set_result)
        channel.send(Failed(Failure.of(EngineDead("rank 1 has gone"))))
        assert str(died.result(60)) == "rank 1 has gone"
        assert process.poll() is None and not client.running and client.exit_status == 1
        with pytest.raises(EngineDead, match="rank 1 has gone"):
            client.check_health()
    client.close()
    assert process.poll() is not None


async def test_shutdown_ends_it_and_that_is_no_error(config: EngineConfig) -> None:
    engine = AsyncLLM.from_config(config)
    pid = process_of(engine).pid
    tasks = [asyncio.create_task(collect(engine, [5], FOREVER, str(i))) for i in range(5)]
    await until_async(lambda: engine.stats.generation_tokens > 4)
    await asyncio.wait_for(engine.shutdown(drain_timeout=0.05), 60)
    for outputs in await asyncio.gather(*tasks):
        assert outputs[-1].outputs[0].finish_reason == "abort"
    assert engine.exit_status == 0 and not alive(pid)
    with pytest.raises(EngineDead, match="not running"):
        engine.check_health()


def test_a_model_that_cannot_be_loaded_is_the_same_error(config: EngineConfig, tmp_path: Path) -> None:
    bad = config.replace(model=str(tmp_path))
    with pytest.raises(CheckpointError) as here:
        AsyncLLM.from_config(bad.replace(engine_process="thread"))
    with pytest.raises(CheckpointError) as there:
        AsyncLLM.from_config(bad)
    assert str(there.value) == str(here.value)


PARENT = """
import json, sys, time
from llmjax import AsyncLLM
from llmjax.config import EngineConfig

engine = AsyncLLM.from_config(EngineConfig(**json.loads(sys.argv[1])))
print(engine.client.pid, flush=True)
time.sleep(600)
"""


def test_the_tokenizer_is_read_while_the_process_loads_the_model(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    class Watched(ProcessEngine):
        def wait_loaded(self) -> EngineInfo:
            order.append("wait")
            return super().wait_loaded()

    def read(config: EngineConfig, model_path: str, *, gguf: GGUFFile | None) -> Tokenizer | None:
        order.append("read")
        assert (model_path, gguf) == (str(LLAMA), None)
        return tokenizer_of(config, model_path, gguf=gguf)

    monkeypatch.setattr("llmjax.engine.setup.tokenizer_of", read)
    engine = Watched(config)
    llm = AsyncLLM.from_config(config, engine)
    engine.close()
    assert order == ["read", "wait"]
    assert llm.tokenizer is not None and llm.info.model_path == str(LLAMA)


def test_without_a_tokenizer_nobody_waits_for_the_model(config: EngineConfig, tmp_path: Path) -> None:
    engine = ProcessEngine(config)
    with pytest.raises(TokenizerError):
        AsyncLLM.from_config(config.replace(tokenizer=str(tmp_path)), engine)
    assert not engine.running


def test_it_does_not_outlive_its_parent(config: EngineConfig) -> None:

    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, json.dumps(dataclasses.asdict(config))], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    try:
        pid = int(parent.stdout.readline())
        assert alive(pid)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    until_ended(pid)


def test_an_engine_that_asks_waits_until_it_may_proceed(config: EngineConfig) -> None:
    engine = ProcessEngine(config, MachineShare(host_memory=2**31), name="llama", asks=True)
    try:
        need = engine.measured.result()
        assert not engine.loaded.done()
        engine.proceed()
        info = engine.wait_loaded()
    finally:
        engine.close()
    assert (need.weight_bytes, need.kv_bytes) == (info.weight_bytes, info.kv_bytes)


def test_an_engine_that_is_refused_says_so_to_those_who_wait(config: EngineConfig) -> None:
    engine = ProcessEngine(config, MachineShare(host_memory=2**31), name="llama", asks=True)
    engine.measured.result()
    engine.kill()
    with pytest.raises(EngineDead, match="was killed by SIGKILL"):
        engine.wait_loaded()
    broken = ProcessEngine(config.replace(kv_cache_memory_bytes=1), asks=True)
    with pytest.raises(ConfigError, match="cannot hold two pages"):
        broken.measured.result()
    broken.close()
