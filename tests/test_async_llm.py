"""Online generation: concurrent streams, cancellation, limits, a dying engine, shutdown."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmjax import LLM, AsyncLLM, SamplingParams
from llmjax.async_llm import LONG_TEXT
from llmjax.config import EngineConfig
from llmjax.engine.clients.loop import ThreadEngine
from llmjax.engine.front.requests import PromptInput
from llmjax.engine.loaded import LoadedEngine
from llmjax.errors import EngineDead, GenerationFailed, InvalidRequest, LLMJaxError, QueueFull
from llmjax.outputs import RequestOutput
from llmjax.sampling.params import RequestOutputKind
from tests.checkpoints import GOLDEN
from tests.waiting import until_async

LLAMA = GOLDEN / "llama"
CHARACTERS = Path(__file__).parent / "engine" / "golden" / "characters"
LONG_CONTEXT = 4096
DELTA = RequestOutputKind.DELTA


@pytest.fixture(scope="module")
def config(compile_cache_dir: str) -> EngineConfig:
    """Four slots and few pages."""
    return EngineConfig(
        model=str(LLAMA),
        tokenizer=str(CHARACTERS),
        dtype="float32",
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=28 * 1536,
        compilation_cache_dir=compile_cache_dir,
        compile_threads=1,
        disable_log_stats=True,
    )


@pytest.fixture(scope="module")
def endless(config: EngineConfig) -> EngineConfig:
    """Requests that run until somebody ends them."""
    return config.replace(
        hf_overrides={"max_position_embeddings": LONG_CONTEXT},
        max_model_len=LONG_CONTEXT,
        page_size=64,
        kv_cache_memory_bytes=280 * 64 * 384,
        max_num_queued_reqs=6,
    )


@pytest.fixture
async def start_here() -> AsyncIterator[Callable[[EngineConfig], AsyncLLM]]:
    """Starts engines on threads, into which tests may look, and stops them afterwards whatever state they are in."""
    made: list[AsyncLLM] = []

    def make(config: EngineConfig) -> AsyncLLM:
        made.append(AsyncLLM.from_config(config))
        return made[-1]

    yield make
    for engine in made:
        await engine.shutdown()


@pytest.fixture(params=["thread", pytest.param("process", marks=pytest.mark.slow)])
def start(
    start_here: Callable[[EngineConfig], AsyncLLM], request: pytest.FixtureRequest
) -> Callable[[EngineConfig], AsyncLLM]:
    """Starts engines on threads and in processes, one test with each; they are stopped afterwards."""
    return lambda config: start_here(config.replace(engine_process=request.param))


@pytest.fixture(scope="module")
def offline(config: EngineConfig) -> Iterator[LLM]:
    llm = LLM.from_config(config)
    yield llm
    llm.close()


def sampled(seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.2, "seed": seed, "max_tokens": 30, "ignore_eos": True, **options})


FOREVER = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, output_kind=DELTA)


async def collect(stream: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in stream]


def tokens(outputs: list[RequestOutput]) -> list[int]:
    """All of a stream of deltas; how many come together depends on how many steps a dispatch took."""
    return [token for output in outputs for token in output.outputs[0].token_ids]


def inside(engine: AsyncLLM) -> LoadedEngine:
    """What computes, where it can be reached."""
    assert isinstance(engine.client, ThreadEngine)
    return engine.client.engine


def all_free(engine: AsyncLLM) -> bool:
    stats = engine.kv_stats()
    return engine.num_requests == 0 and stats.used == 0 and stats.free + stats.cached == stats.total


async def test_streams_say_what_offline_generation_says(
    start: Callable[[EngineConfig], AsyncLLM], config: EngineConfig, offline: LLM
) -> None:
    engine = start(config)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 96, rng.integers(1, 30)).tolist() for _ in range(16)]
    params = [sampled(seed, n=1 + seed % 2) for seed in range(16)]
    alone = [offline.generate(p, q, use_tqdm=False)[0] for p, q in zip(prompts, params, strict=True)]
    kinds = [list(RequestOutputKind)[i % 3] for i in range(16)]
    streams = await asyncio.gather(
        *(
            collect(engine.generate(prompt, own.clone(output_kind=kind), str(i)))
            for i, (prompt, own, kind) in enumerate(zip(prompts, params, kinds, strict=True))
        )
    )
    for expected, outputs, kind in zip(alone, streams, kinds, strict=True):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        for index, wanted in enumerate(expected.outputs):
            parts = [part for output in outputs for part in output.outputs if part.index == index]
            if kind is DELTA:
                assert 1 < len(parts) <= 30  # a dispatch may take several steps
            else:
                parts = parts[-1:]
            assert [token for part in parts for token in part.token_ids] == wanted.token_ids
            assert "".join(part.text for part in parts) == wanted.text
    assert engine.stats.preemptions > 0
    assert engine.stats.finished_requests == 16
    await until_async(lambda: all_free(engine))


async def test_half_of_the_streams_dropped(start: Callable[[EngineConfig], AsyncLLM], endless: EngineConfig) -> None:
    engine = start(endless.replace(max_num_queued_reqs=100))

    async def take_some(name: str, count: int) -> None:
        """Leaves the loop with the generator open, as a server does whose client has gone."""
        stream = engine.generate([5, 6, 7], FOREVER, name)
        seen = 0
        async for output in stream:
            seen += len(output.outputs[0].token_ids)
            if seen >= count:
                break
        await stream.aclose()

    cancelled = [asyncio.create_task(take_some(f"cancelled {i}", 10**6)) for i in range(2)]
    kept = [
        asyncio.create_task(collect(engine.generate([9, 9 + i], sampled(i, max_tokens=20), f"kept {i}")))
        for i in range(8)
    ]
    await asyncio.gather(*(take_some(f"left {i}", 1 + 5 * i) for i in range(4)))
    for task in cancelled:
        task.cancel()
    results = await asyncio.gather(*cancelled, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    for outputs in await asyncio.gather(*kept):
        assert len(outputs[-1].outputs[0].token_ids) == 20
    await until_async(lambda: all_free(engine))
    engine.check_health()


async def test_cancelled_before_the_first_token(
    start: Callable[[EngineConfig], AsyncLLM], endless: EngineConfig
) -> None:
    engine = start(endless)
    task = asyncio.create_task(collect(engine.generate([3] * 2000, FOREVER, "prefilling")))
    await until_async(lambda: engine.kv_stats().used > 0)
    task.cancel()
    await until_async(lambda: all_free(engine))
    assert task.cancelled()


async def test_abort_ends_the_stream_with_its_reason(
    start: Callable[[EngineConfig], AsyncLLM], endless: EngineConfig
) -> None:
    engine = start(endless)
    outputs = []
    async for output in engine.generate([5], FOREVER.clone(n=2), "r"):
        outputs.append(output)
        if len(outputs) == 3:
            await engine.abort("r")
            await engine.abort("unknown")
    assert outputs[-1].finished
    assert {
        part.index: part.finish_reason for output in outputs[-2:] for part in output.outputs if part.finish_reason
    } == {
        0: "abort",
        1: "abort",
    }
    await until_async(lambda: all_free(engine))


async def test_a_stop_string_frees_the_pages(start: Callable[[EngineConfig], AsyncLLM], endless: EngineConfig) -> None:
    engine = start(endless)
    (first, *_), *_ = [(await collect(engine.generate([5], FOREVER.clone(max_tokens=3), "a")))[-1].outputs]
    text = "".join([o.outputs[0].text for o in await collect(engine.generate([5], FOREVER.clone(max_tokens=3), "b"))])
    outputs = await collect(engine.generate([5], FOREVER.clone(stop=[text]), "c"))
    assert first.finish_reason == "length"
    assert "".join(o.outputs[0].text for o in outputs) == ""
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", text)
    await until_async(lambda: all_free(engine))


async def test_too_many_waiting_requests_are_refused(
    start_here: Callable[[EngineConfig], AsyncLLM], endless: EngineConfig
) -> None:
    engine = start_here(endless)
    tasks = [asyncio.create_task(collect(engine.generate([5 + i], FOREVER, str(i)))) for i in range(4)]
    await until_async(lambda: len(inside(engine).scheduler.running) == 4)
    tasks += [asyncio.create_task(collect(engine.generate([5], FOREVER, f"waiting {i}"))) for i in range(6)]
    await until_async(lambda: engine.num_waiting == 6)
    with pytest.raises(QueueFull, match="6 requests are waiting already") as caught:
        await collect(engine.generate([5], FOREVER, "one more"))
    assert caught.value.retry_after > 0
    assert engine.stats.rejections == 1
    assert engine.num_requests == 10
    for task in tasks:
        task.cancel()
    await until_async(lambda: all_free(engine))
    assert (await collect(engine.generate([5], FOREVER.clone(max_tokens=2), "one more")))[-1].finished


async def test_requests_that_have_left_do_not_wait_any_more(
    start_here: Callable[[EngineConfig], AsyncLLM], endless: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the engine takes to hear of it."""
    engine = start_here(endless)
    step, stuck, go_on = inside(engine).step, threading.Event(), threading.Event()

    def slow() -> Any:
        stuck.set()
        assert go_on.wait()
        return step()

    monkeypatch.setattr(inside(engine), "step", slow)
    tasks = [asyncio.create_task(collect(engine.generate([5], FOREVER, str(i)))) for i in range(10)]
    await until_async(stuck.is_set)
    with pytest.raises(QueueFull):
        await collect(engine.generate([5], FOREVER, "one more"))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert engine.num_waiting == 0
    last = asyncio.create_task(collect(engine.generate([5], FOREVER.clone(max_tokens=2), "one more")))
    await asyncio.sleep(0)
    go_on.set()
    assert (await last)[-1].finished
    await until_async(lambda: all_free(engine))


@pytest.mark.parametrize("kind", RequestOutputKind)
async def test_prompt_logprobs_have_texts_which_are_made_beside_the_event_loop(
    start_here: Callable[[EngineConfig], AsyncLLM],
    config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    kind: RequestOutputKind,
) -> None:
    engine = start_here(config)
    assert engine.tokenizer is not None
    decoded, threads = engine._frontend.outputs.decoded, []

    def noted(positions: Any) -> Any:
        threads.append(threading.current_thread())
        return decoded(positions)

    monkeypatch.setattr(engine._frontend.outputs, "decoded", noted)
    params = SamplingParams(prompt_logprobs=2, max_tokens=4, ignore_eos=True, output_kind=kind)
    outputs = await collect(engine.generate("Hello", params, "r"))
    assert len(threads) == 1 and threads[0] is not threading.current_thread()
    found = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert found and all(scores == found[0] for scores in found)
    assert len(found[0]) == len(outputs[0].prompt_token_ids) and found[0][0] is None
    for scores in found[0][1:]:
        assert scores is not None and len(scores) >= 2
        for token, value in scores.items():
            assert value.decoded_token == engine.tokenizer.decode([token], skip_special_tokens=False)


async def test_bad_requests_fail_before_the_first_output(
    start: Callable[[EngineConfig], AsyncLLM], endless: EngineConfig
) -> None:
    engine = start(endless)
    with pytest.raises(InvalidRequest, match="prompt has no tokens"):
        await collect(engine.generate([], FOREVER, "a"))
    first = engine.generate([5], FOREVER, "r")
    await anext(first)
    with pytest.raises(InvalidRequest, match="'r' is in use"):
        await collect(engine.generate([5], FOREVER, "r"))
    assert (await anext(first)).outputs[0].token_ids  # the first one goes on
    await first.aclose()
    await until_async(lambda: all_free(engine))


async def test_an_id_can_be_used_again_at_once(
    start: Callable[[EngineConfig], AsyncLLM], endless: EngineConfig
) -> None:
    engine = start(endless)
    expected = tokens(await collect(engine.generate([9], FOREVER.clone(max_tokens=8), "x")))
    for _ in range(5):
        dropped = engine.generate([5], FOREVER, "r")
        await anext(dropped)
        await dropped.aclose()
        # Outputs of the dropped request, the answer to its abort among them, are still on their way.
        outputs = await collect(engine.generate([9], FOREVER.clone(max_tokens=8), "r"))
        assert outputs[-1].outputs[0].finish_reason == "length"
        assert tokens(outputs) == expected
    await until_async(lambda: all_free(engine))


async def test_an_id_can_be_used_again_while_the_last_output_is_looked_at(
    start: Callable[[EngineConfig], AsyncLLM], endless: EngineConfig
) -> None:
    engine = start(endless)
    old = engine.generate([5], FOREVER.clone(max_tokens=1), "r")
    assert (await anext(old)).finished
    new = engine.generate([9], FOREVER, "r")
    await anext(new)
    await old.aclose()
    for _ in range(3):
        await asyncio.wait_for(anext(new), 60)
    await new.aclose()
    await until_async(lambda: all_free(engine))


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (InvalidRequest("not this one", field="request_id"), InvalidRequest),
        (QueueFull("not now", retry_after=7.0), QueueFull),
        (RuntimeError("what is that"), GenerationFailed),
    ],
)
async def test_a_request_that_only_the_engine_refuses_fails_alone(
    start_here: Callable[[EngineConfig], AsyncLLM],
    endless: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Exception,
    error: type[LLMJaxError],
) -> None:
    """With an error of the type that the engine raised: a server's status follows it."""
    engine = start_here(endless)
    add = inside(engine).add

    def refuse(request: Any) -> None:
        if request.params.n == 2:
            raise refusal
        add(request)

    monkeypatch.setattr(inside(engine), "add", refuse)
    good = engine.generate([5], FOREVER, "good")
    await anext(good)
    with pytest.raises(error, match=str(refusal)) as caught:
        await collect(engine.generate([5], FOREVER.clone(n=2), "bad"))
    assert vars(caught.value) == vars(refusal)
    await anext(good)
    await good.aclose()
    await until_async(lambda: all_free(engine))


@pytest.mark.parametrize("what", ["device.runner.Runner.dispatch", "device.pending.PendingStep.tokens"])
async def test_the_engine_dies(
    start_here: Callable[[EngineConfig], AsyncLLM], endless: EngineConfig, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    engine = start_here(endless)
    died = asyncio.create_task(engine.wait_died())
    streams = [engine.generate([5], FOREVER, str(i)) for i in range(6)]
    for stream in streams[:3]:
        await anext(stream)
    tasks = [asyncio.create_task(collect(stream)) for stream in streams]
    await asyncio.sleep(0)
    assert not died.done()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(f"llmjax.engine.{what}", fail)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert [type(result) for result in results] == [EngineDead] * 6
    assert await asyncio.wait_for(died, 60) == await asyncio.wait_for(engine.wait_died(), 60) == 1
    assert str(results[0]) == "the engine stopped: the device is on fire"
    with pytest.raises(EngineDead, match="on fire"):
        engine.check_health()
    with pytest.raises(EngineDead, match="on fire"):
        await collect(engine.generate([5], FOREVER, "late"))
    assert engine.num_requests == 0
    await engine.shutdown()


async def test_a_process_that_the_engine_needs_goes_while_a_step_waits_for_it(
    start_here: Callable[[EngineConfig], AsyncLLM], endless: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams end, and so does the engine, although its thread hangs."""
    watchers: list[Callable[[LLMJaxError], None]] = []
    waits, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr("llmjax.engine.ranks.alone.Alone.watch", lambda _, lost: watchers.append(lost))
    monkeypatch.setattr("llmjax.engine.clients.loop.LEAVE_SECONDS", 0.01)
    engine = start_here(endless)

    def hang(*_: Any) -> None:
        waits.set()
        go_on.wait(60)
        raise RuntimeError("the exchange failed")

    streams = [engine.generate([5], FOREVER, str(i)) for i in range(3)]
    for stream in streams:
        await anext(stream)
    monkeypatch.setattr("llmjax.engine.device.pending.PendingStep.tokens", hang)
    tasks = [asyncio.create_task(collect(stream)) for stream in streams]
    await until_async(waits.is_set)
    (lost,) = watchers
    threading.Thread(target=lost, args=(EngineDead("rank 1 has gone"),)).start()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert [str(result) for result in results] == ["the engine stopped: rank 1 has gone"] * 3
    with pytest.raises(EngineDead, match="rank 1 has gone"):
        engine.check_health()
    assert engine.exit_status == 1
    await asyncio.wait_for(engine.shutdown(), 60)
    assert isinstance(engine.client, ThreadEngine) and engine.client._thread is not None
    assert engine.client._thread.is_alive() and not go_on.is_set()
    go_on.set()
    engine.client._thread.join(60)
    assert str(engine.client.error) == "rank 1 has gone"


async def test_the_engine_dies_while_the_first_request_is_on_its_way(
    start_here: Callable[[EngineConfig], AsyncLLM], endless: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_here(endless)
    check_open = engine._check_open

    def fail(*_: Any) -> None:
        raise RuntimeError("the device is on fire")

    def dying() -> None:
        check_open()
        engine.client.abort(-1)
        client = engine.client
        assert isinstance(client, ThreadEngine) and client._thread is not None
        client._thread.join(60)

    monkeypatch.setattr(inside(engine), "abort", fail)
    monkeypatch.setattr(engine, "_check_open", dying)
    with pytest.raises(EngineDead, match="on fire"):
        await asyncio.wait_for(collect(engine.generate([5], FOREVER, "first")), 60)
    assert engine.num_requests == 0


@pytest.mark.parametrize("form", [lambda text: text, lambda text: {"prompt": text, "cache_salt": "s"}])
async def test_the_engine_stops_while_a_prompt_is_tokenized(
    start: Callable[[EngineConfig], AsyncLLM],
    endless: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    form: Callable[[str], PromptInput],
) -> None:
    engine = start(endless)
    assert engine.tokenizer is not None
    began, go_on = threading.Event(), threading.Event()

    def encode(text: str, **_: Any) -> list[int]:
        began.set()
        assert go_on.wait()
        return [5]

    monkeypatch.setattr(engine.tokenizer, "encode", encode)
    prompt = form("a" * (LONG_TEXT + 1))  # goes to a thread, and the context could hold it
    task = asyncio.create_task(collect(engine.generate(prompt, FOREVER, "long")))
    await until_async(began.is_set)
    await engine.shutdown()
    go_on.set()
    with pytest.raises(QueueFull, match="shutting down"):
        await asyncio.wait_for(task, 60)


async def test_outputs_that_cannot_become_text_end_their_streams(
    start: Callable[[EngineConfig], AsyncLLM], endless: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(endless)
    broken = engine.generate([5], FOREVER, "broken")
    await anext(broken)
    process = engine._frontend.process

    def fail_once(*_: Any) -> None:
        monkeypatch.setattr(engine._frontend, "process", process)
        raise RuntimeError("no such letter")

    monkeypatch.setattr(engine._frontend, "process", fail_once)
    with pytest.raises(LLMJaxError, match="internal error: no such letter"):
        await asyncio.wait_for(collect(broken), 60)
    later = engine.generate([5], FOREVER, "later")
    await anext(later)
    await later.aclose()
    await until_async(lambda: all_free(engine))


async def test_a_step_that_hangs_is_noticed(
    start: Callable[[EngineConfig], AsyncLLM],
    endless: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = start(endless)
    engine.check_health()
    monkeypatch.setattr("llmjax.engine.clients.client.STUCK_AFTER", -1.0)
    stream = engine.generate([5], FOREVER, "r")
    with pytest.raises(EngineDead, match="in one step"):
        while True:
            await anext(stream)
            engine.check_health()
    await stream.aclose()
    monkeypatch.undo()
    engine.check_health()
    assert any("its threads are shown" in message for message in caplog.messages)
    if isinstance(engine.client, ThreadEngine):  # a process shows its own itself
        stacks = [message for message in caplog.messages if message.startswith("thread ")]
        assert any("check_health" in stack for stack in stacks)  # this one, and the engine's
        assert any("engine/clients/loop.py" in stack for stack in stacks)


async def test_shutdown_lets_running_requests_finish(
    start: Callable[[EngineConfig], AsyncLLM], config: EngineConfig
) -> None:
    engine = start(config)
    tasks = [asyncio.create_task(collect(engine.generate([5], sampled(i), str(i)))) for i in range(6)]
    await asyncio.sleep(0)
    assert engine.num_requests == 6
    stopping = asyncio.create_task(engine.shutdown(drain_timeout=3600))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="shutting down"):
        await collect(engine.generate([5], sampled(0), "late"))
    for outputs in await asyncio.gather(*tasks):
        assert outputs[-1].outputs[0].finish_reason == "length"
    await asyncio.wait_for(stopping, 60)
    await engine.shutdown()  # a second time does nothing
    with pytest.raises(EngineDead):
        engine.check_health()


async def test_a_shutdown_that_was_given_up_can_be_asked_for_again(
    start: Callable[[EngineConfig], AsyncLLM], endless: EngineConfig
) -> None:
    engine = start(endless)
    task = asyncio.create_task(collect(engine.generate([5], FOREVER, "r")))
    await asyncio.sleep(0)
    patient = asyncio.create_task(engine.shutdown(drain_timeout=600))
    await asyncio.sleep(0)
    patient.cancel()
    await asyncio.gather(patient, return_exceptions=True)
    assert patient.cancelled() and engine.client.running
    await asyncio.wait_for(engine.shutdown(), 60)
    assert not engine.client.running
    assert (await asyncio.wait_for(task, 60))[-1].outputs[0].finish_reason == "abort"


async def test_a_shutdown_delivers_what_the_engine_says_last(
    start_here: Callable[[EngineConfig], AsyncLLM], endless: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However soon the engine's thread has ended."""
    engine = start_here(endless)
    client = engine.client
    assert isinstance(client, ThreadEngine) and client._thread is not None
    stop, thread = client.stop, client._thread

    def stop_at_once() -> None:
        stop()
        thread.join(60)

    monkeypatch.setattr(client, "stop", stop_at_once)
    task = asyncio.create_task(collect(engine.generate([5], FOREVER, "r")))
    await until_async(lambda: engine.kv_stats().used > 0)
    await engine.shutdown()
    assert (await asyncio.wait_for(task, 60))[-1].outputs[0].finish_reason == "abort"


async def test_shutdown_aborts_what_takes_too_long(
    start_here: Callable[[EngineConfig], AsyncLLM], endless: EngineConfig
) -> None:
    engine = start_here(endless)
    tasks = [asyncio.create_task(collect(engine.generate([5], FOREVER, str(i)))) for i in range(6)]
    await until_async(lambda: len(inside(engine).scheduler.running) == 4)
    await asyncio.wait_for(engine.shutdown(drain_timeout=0.05), 60)
    for outputs in await asyncio.wait_for(asyncio.gather(*tasks), 60):
        assert outputs[-1].outputs[0].finish_reason == "abort"
    stats = inside(engine).kv_stats()
    assert engine.num_requests == 0 and stats.used == 0 and stats.free + stats.cached == stats.total
