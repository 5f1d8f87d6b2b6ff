"""Several engines as one sample the tokens of one engine, and survive when some of them die."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmjax import LLM, AsyncLLM, SamplingParams
from llmjax.config import EngineConfig
from llmjax.engine.clients.data_parallel import DataParallelEngine, info_of_all
from llmjax.engine.clients.restarts import RestartPolicy, Restarts
from llmjax.errors import CheckpointError, ConfigError, EngineDead
from llmjax.outputs import RequestOutput
from llmjax.sampling.params import RequestOutputKind
from tests.checkpoints import GOLDEN
from tests.engine.clients.test_process import Recorder, alive, collect
from tests.waiting import until_async

LLAMA = GOLDEN / "llama"
FOREVER = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PAGE = 64
LONG_CONTEXT = 2**15  # tokens that a request without a limit gets: many more than a test waits for
TOKEN_BYTES = 384  # of keys and values


@pytest.fixture(scope="module")
def config(compile_cache_dir: str) -> EngineConfig:
    return EngineConfig(
        model=str(LLAMA),
        skip_tokenizer_init=True,
        dtype="float32",
        hf_overrides={"max_position_embeddings": LONG_CONTEXT},
        page_size=PAGE,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=(2 * LONG_CONTEXT + 16 * PAGE) * TOKEN_BYTES,
        decode_steps=1,
        compilation_cache_dir=compile_cache_dir,
        compile_threads=1,
        disable_log_stats=True,
        data_parallel_size=2,
    )


@pytest.fixture(scope="module")
def shared(config: EngineConfig) -> Iterator[AsyncLLM]:
    engine = AsyncLLM.from_config(config)
    yield engine
    engine.client.close()


@pytest.fixture
async def engine(shared: AsyncLLM) -> AsyncIterator[AsyncLLM]:
    """Two processes for all tests, which leave both alive and idle."""
    await until_async(lambda: all(state.serving for state in shared.states))
    yield shared
    await until_async(lambda: all(state.serving for state in shared.states))
    await until_async(lambda: shared.num_requests == 0 and shared.kv_stats().used == 0)
    client = client_of(shared)
    await until_async(lambda: not any(client._router.requests_of(number) for number in (0, 1)))
    assert [client._router.queued(number) for number in (0, 1)] == [0, 0]
    shared.check_health()
    assert shared.exit_status == 0


@pytest.fixture(scope="module")
def offline(config: EngineConfig) -> Iterator[LLM]:
    llm = LLM.from_config(config.replace(data_parallel_size=1))
    yield llm
    llm.close()


def client_of(engine: AsyncLLM) -> DataParallelEngine:
    assert isinstance(engine.client, DataParallelEngine)
    return engine.client


def pids(engine: AsyncLLM) -> list[int]:
    """The process ids of the engines."""
    return [place.engine.pid for place in client_of(engine)._places]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def begin(engine: AsyncLLM, names: list[str]) -> dict[str, asyncio.Task[list[RequestOutput]]]:
    """Endless requests that all generate, by name."""
    seen: set[str] = set()

    async def stream(name: str, prompt: list[int]) -> list[RequestOutput]:
        outputs = []
        async for output in engine.generate(prompt, FOREVER, name):
            seen.add(name)
            outputs.append(output)
        return outputs

    tasks = {name: asyncio.create_task(stream(name, [5 + i])) for i, name in enumerate(names)}
    await until_async(lambda: seen == set(names))
    return tasks


def places(engine: AsyncLLM, names: list[str]) -> dict[str, int | None]:
    """The engine of each open request."""
    client = client_of(engine)
    ids = {name: engine._frontend.id_of(name) for name in names}
    return {name: client._router.engine_of(known) for name, known in ids.items() if known is not None}


async def test_tokens_are_those_of_one_engine_and_counts_say_which_had_them(engine: AsyncLLM, offline: LLM) -> None:
    recorder = Recorder()
    engine.add_stat_logger(recorder)
    seeded = SamplingParams(temperature=1.1, seed=3, n=2, max_tokens=7, ignore_eos=True, logprobs=1)
    requests: list[tuple[list[int], SamplingParams]] = [([9 + i] * (3 + 7 * i), SHORT) for i in range(8)]
    requests += [([5, 6, 7], seeded), ([8] * 40, seeded)]
    expected = offline.generate([prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)
    found = await asyncio.gather(
        *(collect(engine, prompt, params, str(i)) for i, (prompt, params) in enumerate(requests))
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert [c.token_ids for c in mine[-1].outputs] == [c.token_ids for c in theirs.outputs]
    assert {stats.engine for stats in recorder.requests} == {0, 1}
    # A step says which engine it was; the last one of a request may come after its last token.
    wanted = sum(len(c.token_ids) for output in expected for c in output.outputs)
    await until_async(lambda: sum(step.num_generation_tokens for step in recorder.steps) == wanted)
    for number in (0, 1):
        generated = sum(step.num_generation_tokens for step in recorder.steps if step.engine == number)
        assert generated == sum(r.num_generation_tokens for r in recorder.requests if r.engine == number) > 0
    client_of(engine).loggers.remove(recorder)


@pytest.mark.slow
def test_offline(config: EngineConfig, offline: LLM) -> None:
    llm = LLM.from_config(config)
    try:
        prompts: Any = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (5, 9, 4, 70, 30)]
        expected = offline.generate(prompts, SHORT, use_tqdm=False)
        found = llm.generate(prompts, SHORT, use_tqdm=False)
        assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
    finally:
        llm.close()


@pytest.mark.slow
async def test_questions_are_answered_for_both(engine: AsyncLLM, offline: LLM) -> None:
    one = offline.kv_stats()
    assert engine.kv_stats().total == 2 * one.total
    assert engine.info.max_num_seqs == 2 * offline.info.max_num_seqs
    assert engine.info.kv_tokens == 2 * offline.info.kv_tokens
    assert engine.info.max_model_len == offline.info.max_model_len
    assert engine.info.weight_bytes == 2 * offline.info.weight_bytes
    await engine.warm_up()
    programs = await engine.programs()
    assert [(p.decode, p.tokens) for p in programs] == [(True, 1), (True, 2), (False, 16)]
    assert all(p.seconds is not None for p in programs)
    # One after another they take turns, so both get some.
    for i in range(4):
        await collect(engine, [20 + i] * (PAGE + 1), SHORT, str(i))
    assert engine.kv_stats().cached > 0
    await engine.reset_prefix_cache()
    assert engine.kv_stats().cached == 0


async def test_a_prompt_goes_where_its_prefix_is(engine: AsyncLLM) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 17
    recorder = Recorder()
    engine.add_stat_logger(recorder)
    await collect(engine, prompt, SHORT, "first")
    await collect(engine, [50] * 5, SHORT, "another")
    found = (await collect(engine, [*prompt, 7], SHORT, "again"))[-1]
    assert found.num_cached_tokens == len(prompt) // PAGE * PAGE
    engines = {stats.request_id: stats.engine for stats in recorder.requests}
    assert engines["again"] == engines["first"] != engines["another"]
    client_of(engine).loggers.remove(recorder)


async def test_requests_are_aborted_where_they_are(engine: AsyncLLM) -> None:
    names = [str(i) for i in range(6)]  # two more than fit: some of them wait
    tasks = {name: asyncio.create_task(collect(engine, [5 + int(name)], FOREVER, name)) for name in names}
    await until_async(lambda: engine.num_requests == len(names))
    assert engine.num_waiting == 2
    assert sorted(map(str, places(engine, names).values())) == ["0"] * 3 + ["1"] * 3
    for name in names[:5]:
        await engine.abort(name)
    tasks["5"].cancel()
    *ends, cancelled = await asyncio.wait_for(asyncio.gather(*tasks.values(), return_exceptions=True), 60)
    for outputs in ends:
        assert not isinstance(outputs, BaseException)
        assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
    assert isinstance(cancelled, asyncio.CancelledError)
    await engine.abort("nobody")


async def test_a_killed_engines_streams_end_the_others_finish_and_it_comes_back(
    engine: AsyncLLM, offline: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = await begin(engine, ["a", "b"])
    at = places(engine, ["a", "b"])
    left, lost = sorted(tasks, key=lambda name: at[name] == 1)
    assert (at[left], at[lost]) == (0, 1)
    victim, before = pids(engine)[1], engine.states[1].restarts
    with caplog.at_level(logging.WARNING):
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(EngineDead) as end:
            await asyncio.wait_for(tasks[lost], 60)
    assert str(end.value) == "engine 1 stopped: its process was killed by SIGKILL (out of memory?)"
    engine.check_health()  # the other one serves
    assert engine.exit_status == 0
    # Those of the other go on, and so do new ones, questions too.
    expected = offline.generate([[9, 8, 7]], SHORT, use_tqdm=False)[0].outputs[0].token_ids
    assert (await collect(engine, [9, 8, 7], SHORT, "new"))[-1].outputs[0].token_ids == expected
    assert engine.kv_stats().used > 0 and not tasks[left].done()
    with stopped(pids(engine)[0]):  # else its request might come to its end meanwhile
        await until_async(lambda: engine.states[1].serving)
    assert engine.states[1].restarts == before + 1 and engine.states[0].serving
    assert pids(engine)[1] != victim and not alive(victim)
    # It is idle, so it is the one that gets this.
    recorder = Recorder()
    engine.add_stat_logger(recorder)
    assert (await collect(engine, [9, 8, 7, 6], SHORT, "there"))[-1].finished
    assert [stats.engine for stats in recorder.requests] == [1]
    client_of(engine).loggers.remove(recorder)
    await engine.abort(left)
    outputs = await asyncio.wait_for(tasks[left], 60)
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert "engine 1 is started again in " in caplog.text


@pytest.mark.slow
async def test_when_all_die_at_once_nobody_serves_until_they_are_back(engine: AsyncLLM) -> None:
    tasks = await begin(engine, ["a", "b"])
    before = [state.restarts for state in engine.states]
    for pid in pids(engine):
        os.kill(pid, signal.SIGKILL)
    ends = await asyncio.wait_for(asyncio.gather(*tasks.values(), return_exceptions=True), 60)
    assert [type(end) for end in ends] == [EngineDead] * 2
    await until_async(lambda: [state.restarts for state in engine.states] == [n + 1 for n in before])
    assert (await collect(engine, [9], SHORT, "after"))[-1].finished


async def test_nobody_serves_while_all_are_dead(config: EngineConfig) -> None:
    """The wait before a restart does not end here, so that the state can be seen."""
    client = DataParallelEngine(config, policy=RestartPolicy(first_wait=3600, longest_wait=3600))
    died: list[BaseException] = []
    client.start(deliver=lambda _: None, died=died.append)
    try:
        for place in client._places:
            place.engine.kill()
        await until_async(lambda: not any(state.serving for state in client.states))
        with pytest.raises(EngineDead, match=r"no engine serves at the moment \(engine 0: its process was killed"):
            client.check_health()
        assert client.exit_status == 0 and client.running and not died
    finally:
        client.close()
    assert not client.running and not any(thread.is_alive() for thread in client._threads)


async def test_one_that_dies_too_often_ends_all_and_says_its_status(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = RestartPolicy(most=1, first_wait=0.01)
    monkeypatch.setattr("llmjax.engine.clients.data_parallel.RestartPolicy", lambda: policy)
    engine = AsyncLLM.from_config(config)
    try:
        first = pids(engine)
        os.kill(first[0], signal.SIGKILL)
        await until_async(lambda: engine.states[0].restarts == 1)
        tasks = await begin(engine, ["a", "b", "c", "d"])
        processes = pids(engine)
        os.kill(processes[0], signal.SIGKILL)
        ends = await asyncio.wait_for(asyncio.gather(*tasks.values(), return_exceptions=True), 60)
        assert all(isinstance(end, EngineDead) for end in ends)
        await until_async(lambda: engine.exit_status == 128 + signal.SIGKILL)
        for call in (engine.check_health, engine.kv_stats):
            with pytest.raises(EngineDead):
                call()
        assert not any(state.serving for state in engine.states)
        await asyncio.wait_for(engine.shutdown(), 60)
        assert not any(alive(pid) for pid in {*first, *processes})
    finally:
        engine.client.close()


@pytest.mark.slow
async def test_a_process_that_cannot_be_started_is_tried_again(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from llmjax.engine.clients import data_parallel

    refused = []

    class Scarce(data_parallel.ProcessEngine):
        def __init__(self, config: EngineConfig, share: Any) -> None:
            if not refused:
                refused.append(share.rank)
                raise EngineDead("the engine's process cannot be started: no memory")
            super().__init__(config, share)

    monkeypatch.setattr(data_parallel, "ProcessEngine", Scarce)
    before, victim = engine.states[1].restarts, client_of(engine)._places[1]
    # Those of other tests are not counted.
    victim.deaths = Restarts(RestartPolicy(first_wait=0.01))
    os.kill(victim.engine.pid, signal.SIGKILL)
    await until_async(lambda: engine.states[1].restarts == before + 1)
    assert refused == [1]
    assert "engine 1 could not be started again: the engine's process cannot be started: no memory" in caplog.text
    assert (await collect(engine, [9], SHORT, "after"))[-1].finished


@pytest.mark.slow
async def test_one_that_hangs_is_killed_and_comes_back(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = await begin(engine, ["a", "b"])
    at, before = places(engine, ["a", "b"]), engine.states[0].restarts
    hanging = next(name for name in at if at[name] == 0)
    os.kill(pids(engine)[0], signal.SIGSTOP)
    client = client_of(engine)
    # Only the one that does not answer is asked: the other may be slow, too.
    await until_async(lambda: engine.check_health() or client._places[0].engine._ping is not None)
    client._places[0].engine._pinged -= 10_000
    engine.check_health()
    with pytest.raises(EngineDead, match="engine 0 stopped"):
        await asyncio.wait_for(tasks.pop(hanging), 60)
    await until_async(lambda: engine.states[0].restarts == before + 1)
    (other,) = tasks
    await engine.abort(other)
    await asyncio.wait_for(tasks[other], 60)


@pytest.mark.slow
async def test_shutdown_ends_all_even_one_that_is_being_started(config: EngineConfig) -> None:
    engine = AsyncLLM.from_config(config)
    client = client_of(engine)
    tasks = await begin(engine, ["a", "b"])
    os.kill(pids(engine)[0], signal.SIGKILL)
    await until_async(lambda: bool(client._coming))
    processes = [one.pid for one in client._engines()]
    await asyncio.wait_for(engine.shutdown(drain_timeout=0.05), 60)
    ends = await asyncio.wait_for(asyncio.gather(*tasks.values(), return_exceptions=True), 60)
    assert all(isinstance(end, EngineDead) or end[-1].outputs[0].finish_reason == "abort" for end in ends)
    assert engine.exit_status == 0 and not any(alive(pid) for pid in processes)
    assert not any(thread.is_alive() for thread in client._threads)
    with pytest.raises(EngineDead, match="not running"):
        engine.check_health()


def test_a_model_that_cannot_be_loaded_is_the_same_error(config: EngineConfig, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as here:
        AsyncLLM.from_config(config.replace(model=str(tmp_path), data_parallel_size=1))
    with pytest.raises(CheckpointError) as there:
        AsyncLLM.from_config(config.replace(model=str(tmp_path)))
    assert str(there.value) == str(here.value)


def test_an_engine_that_cannot_be_made_leaves_none(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the engines gets a setting that is refused."""
    made: list[Any] = []
    from llmjax.engine.clients import data_parallel

    class Made(data_parallel.ProcessEngine):
        def __init__(self, config: EngineConfig, share: Any) -> None:
            made.append(self)
            super().__init__(config.replace(max_model_len=10**6) if share.rank == 1 else config, share)

    monkeypatch.setattr(data_parallel, "ProcessEngine", Made)
    with pytest.raises(ConfigError, match="max_model_len 1000000 is above"):
        DataParallelEngine(config)
    assert len(made) == 2 and not any(alive(one.pid) for one in made)


def test_several_engines_as_one(offline: LLM) -> None:
    info = replace(offline.info, max_num_seqs=4, longest_contexts={1: 100, 2: 50, 4: 25}, max_model_len=100)
    both = info_of_all([info, replace(info, max_model_len=80, longest_contexts={1: 80, 2: 40, 4: 20})])
    assert both.longest_contexts == {1: 80, 2: 80, 4: 40, 8: 20}
    assert (both.max_model_len, both.max_num_seqs) == (80, 8)
    assert both.device == f"2 engines: {info.device}, {info.device}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size must be at least 1, not 0"),
        ({"data_parallel_size": 2, "engine_process": "thread"}, "several engines run in processes"),
        ({"data_parallel_size": 2, "threads": 1}, "threads is 1: data_parallel_size 2 needs one for each engine"),
        (
            {"data_parallel_size": 2, "device_ids": "0,1,2"},
            "device_ids names 3 devices, which data_parallel_size 2 does",
        ),
        (
            {"data_parallel_size": 2, "tensor_parallel_size": 2, "device_ids": "0,1"},
            "tensor_parallel_size is 2 and data_parallel_size 2, but device_ids names 2 devices",
        ),
    ],
)
def test_what_does_not_come_out_even(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_devices_are_those_of_all_engines() -> None:
    assert EngineConfig(data_parallel_size=2, tensor_parallel_size=3).device_numbers == tuple(range(6))
    assert EngineConfig(data_parallel_size=2, device_ids="4,5,0,1").device_numbers == (4, 5, 0, 1)
