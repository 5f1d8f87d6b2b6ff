"""Pipeline parallelism: models whose layers are divided among stages give the tokens that one process gives."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmjax import LLM, SamplingParams, StructuredOutputsParams
from llmjax.config import EngineConfig
from llmjax.engine import build
from llmjax.engine.build import load
from llmjax.engine.device.commands import RunStep, SetSampled
from llmjax.engine.ranks.follower import Follower
from llmjax.engine.ranks.join import free_port
from llmjax.engine.ranks.leader import Leader
from llmjax.engine.ranks.worker import Worker
from llmjax.errors import Asleep, ConfigError, EngineDead
from llmjax.kv_transfer import KVTransfer
from tests.checkpoints import GOLDEN, SEEING
from tests.engine import test_images
from tests.engine.on_devices import EVERYTHING, GREEDY, OPTIONS, PROMPTS
from tests.engine.tiers.test_transfer import Relay
from tests.levels import at_levels

TESTS = Path(__file__).parents[1]
CONTEXT = 128
LONG = replace(GREEDY, max_tokens=64)
LONG_ENOUGH = replace(GREEDY, max_tokens=40)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@contextmanager
def staged(model: Path, stages: int, **settings: Any) -> Iterator[LLM]:
    """An engine whose other stages are threads of this process; each is all of a rank but its process."""
    options = OPTIONS | {"compilation_cache_dir": None, "max_model_len": 64} | settings
    if stages > 1:
        port = free_port("127.0.0.1")
        options |= {"pipeline_parallel_size": stages, "nnodes": stages, "master_port": port, "master_secret": "word"}
    errors: list[Exception] = []

    def follow(config: EngineConfig) -> None:
        try:
            group = Follower(config)
            config, compiler = load(config, group)
            Worker(compiler, config.replace(compile_threads=1), group).run()
        except Exception as error:
            errors.append(error)

    configs = [EngineConfig(model=str(model), **(options | {"node_rank": rank})) for rank in range(1, stages)]
    threads = [threading.Thread(target=follow, args=(config,), daemon=True) for config in configs]
    for thread in threads:
        thread.start()
    llm = LLM(str(model), **options)
    try:
        yield llm
    finally:
        llm.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors


def found(llm: LLM, *all_params: SamplingParams) -> list[Any]:
    """Tokens and log-probabilities of both prompts under each, one after another."""
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [output for params in all_params for output in llm.generate(prompts, params, use_tqdm=False)]


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def scores_of(outputs: list[Any]) -> list[tuple[int, float]]:
    positions = [
        position
        for output in outputs
        for position in (*(output.outputs[0].logprobs or []), *(output.prompt_logprobs or [None])[1:])
    ]
    return [(token, logprob.logprob) for position in positions for token, logprob in sorted(position.items())]


def check(model: Path, stages: int, *all_params: SamplingParams, **settings: Any) -> None:
    with staged(model, 1, **settings) as llm:
        expected = found(llm, *all_params)
    with staged(model, stages, **settings) as llm:
        outputs = found(llm, *all_params)
        assert llm.stats.prefix_cache_hits if settings.get("enable_prefix_caching", True) else True
    assert tokens_of(outputs) == tokens_of(expected)
    one, several = scores_of(expected), scores_of(outputs)
    assert [token for token, _ in several] == [token for token, _ in one]
    np.testing.assert_allclose([x for _, x in several], [x for _, x in one], atol=1e-4)


def test_every_feature_of_sampling_in_three_stages() -> None:
    overrides = {"max_position_embeddings": CONTEXT}
    check(GOLDEN / "llama", 3, LONG, EVERYTHING, LONG, hf_overrides=overrides, max_model_len=CONTEXT)


def test_both_stages_sleep_and_wake() -> None:
    with staged(GOLDEN / "llama", 2) as llm:
        expected = tokens_of(found(llm, LONG_ENOUGH))
        for level in (1, 2):
            llm.sleep(level)
            with pytest.raises(Asleep):
                found(llm, LONG_ENOUGH)
            llm.wake_up()
            assert tokens_of(found(llm, LONG_ENOUGH)) == expected


@pytest.mark.slow
def test_windows_and_drafts_in_two_stages() -> None:
    """The model has six layers of two kinds, of which a stage may have only one."""
    with staged(GOLDEN / "gemma3", 1, max_num_seqs=1) as llm:
        expected = tokens_of(found(llm, LONG_ENOUGH, EVERYTHING))
    settings: dict[str, Any] = {"speculative_config": NGRAM, "kv_cache_dtype": "float32", "max_num_seqs": 1}
    with staged(GOLDEN / "gemma3", 2, **settings) as llm:
        llm.engine.runner.programs.wait_all()  # there are no drafts before
        llm.engine._speculation._pays = lambda rows, more: True
        assert tokens_of(found(llm, LONG_ENOUGH, EVERYTHING)) == expected
        assert llm.stats.draft_tokens


@pytest.mark.slow
def test_forms_of_output_in_two_stages() -> None:
    """Masks are filled between two dispatches, of which the last stage has both."""
    forms = [
        StructuredOutputsParams(regex="[a-z]{4}(this|that) one [0-9]{5}"),
        StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
        None,
    ]
    wanted = [SamplingParams(seed=3 + i, max_tokens=24, structured_outputs=form) for i, form in enumerate(forms)]
    settings: dict[str, Any] = {
        "tokenizer": str(TESTS / "engine" / "golden" / "characters"),
        "skip_tokenizer_init": False,
    }
    texts = []
    for stages in (1, 2):
        with staged(GOLDEN / "llama", stages, max_model_len=64, **settings) as llm:
            outputs = llm.generate([[5, 6, 7, 8, 9]] * len(wanted), wanted, use_tqdm=False)
            texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1]
    assert texts[1][0][4:13] in ("this one ", "that one ")


@pytest.mark.parametrize(
    ("name", "stages"), at_levels([("llama", 2), ("gemma3", 3), ("qwen3-next", 3)], slow=[("llama", 2)])
)
def test_pages_of_all_stages_leave_and_come_back(name: str, stages: int, tmp_path: Path) -> None:
    """They come back from host memory, and from disk in a later start. A stage of gemma3 may have only one kind of
    layers."""
    with staged(GOLDEN / name, 1) as llm:
        expected = tokens_of(found(llm, GREEDY))
    settings: dict[str, Any] = {"kv_offloading_size": 0.05, "kv_offloading_dir": str(tmp_path)}
    with staged(GOLDEN / name, stages, **settings) as llm:
        assert tokens_of(found(llm, GREEDY)) == expected
        for pool in llm.engine.kv.pools:
            pool.release(pool.allocate(pool.available) or [])
        llm.engine.kv.tier.move(llm.engine.runner)
        assert tokens_of(found(llm, GREEDY)) == expected
        assert llm.stats.offload.host_hits
    with staged(GOLDEN / name, stages, **settings) as llm:
        assert tokens_of(found(llm, GREEDY)) == expected
        assert llm.stats.offload.disk_hits


@pytest.mark.parametrize(
    ("name", "stages"),
    at_levels(
        [("deepseek-v3", 2), ("qwen3-next", 3), ("mamba2", 2), ("gpt2", 2), ("falcon-h1", 2)], slow=[("qwen3-next", 3)]
    ),
)
def test_families(name: str, stages: int) -> None:
    """Covers latent attention and experts, recurrent states, learned positions, and two mixers in a layer."""
    check(GOLDEN / name, stages, LONG_ENOUGH, EVERYTHING, LONG_ENOUGH, max_model_len=64)


@pytest.mark.slow
def test_two_streams_are_in_two_stages_at_once() -> None:
    """While the last stage decodes one stream, the first stage has been told to decode the other."""
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with staged(GOLDEN / "llama", 1) as llm:
        expected = tokens_of(llm.generate(prompts, LONG_ENOUGH, use_tqdm=False))
    with staged(GOLDEN / "llama", 2) as llm:
        sent: list[Any] = []
        group: Any = llm.engine.runner._group
        broadcast = group.broadcast
        group.broadcast = lambda message: (sent.append(message), broadcast(message))[1]
        assert tokens_of(llm.generate(prompts, LONG_ENOUGH, use_tqdm=False)) == expected
    taken = [message.slot.tolist() for message in sent if isinstance(message, SetSampled)]
    assert taken[0] == [0, 1] and taken[1:21] == [[0], [1]] * 10
    order = "".join("S" if isinstance(message, RunStep) else "T" for message in sent)
    # Two chunks, what both prompts have sampled, a step for each of them; from then on one of two is always under way.
    assert order.startswith("SST" + "SS" + "TS" * 20)


@pytest.mark.usefixtures("patience")
def test_pages_are_exchanged_with_an_engine_that_has_no_stages() -> None:
    ports = [free_port("127.0.0.1") for _ in range(3)]  # of two servers, and of what cuts connections
    peers = [f"127.0.0.1:{port}" for port in ports]
    role = {"kv_connector": "TCPConnector", "kv_role": "kv_both", "kv_buffer_size": 2**20, "kv_peers": peers}

    def settings(port: int) -> dict[str, Any]:
        return {"kv_transfer_config": role | {"kv_port": port}, "master_secret": "word"}

    def tokens(llm: LLM, transfer: KVTransfer | None = None) -> list[int]:
        params = replace(GREEDY, kv_transfer=transfer)
        prompt: Any = {"prompt_token_ids": PROMPTS[0]}
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    with (
        staged(GOLDEN / "llama", 1, **settings(ports[0])) as one,
        staged(GOLDEN / "llama", 2, **settings(ports[1])) as several,
    ):
        expected = tokens(one)
        for giver, taker, cut in ((one, several, False), (several, one, False), (one, several, True)):
            for llm in (one, several):
                llm.engine.reset_prefix_cache()
            before = taker.stats.offload.remote_hits
            assert tokens(giver, KVTransfer(give="pages")) == expected
            config = giver.config.kv_transfer
            assert config is not None
            port = Relay(config.kv_port, 4000, at=ports[2]).port if cut else config.kv_port
            assert tokens(taker, KVTransfer(take="pages", peer=f"127.0.0.1:{port}")) == expected
            hits = taker.stats.offload.remote_hits - before
            assert 0 < hits < 16 if cut else hits == 16  # tokens of four pages


def test_nobody_is_started_for_stages_that_there_are_no_layers_for(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[EngineConfig] = []
    monkeypatch.setattr(build, "LocalRanks", started.append)
    config = EngineConfig(model=str(GOLDEN / "llama"), pipeline_parallel_size=9)
    with pytest.raises(
        ConfigError, match=r"^pipeline_parallel_size 9: the model has \d layers, and each stage needs one"
    ):
        build.build_engine(config)
    assert started == []


def test_a_stage_that_goes_ends_every_request() -> None:
    config = EngineConfig(model="somewhere", nnodes=2, pipeline_parallel_size=2, master_port=free_port("127.0.0.1"))
    follower: list[Follower] = []
    thread = threading.Thread(target=lambda: follower.append(Follower(config.replace(node_rank=1))), daemon=True)
    thread.start()
    leader = Leader(config, None)
    thread.join(60)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(leader.receive_hidden)
        follower[0].channel._socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(EngineDead, match=r"rank 1 \(127.0.0.1\) has gone"):
            waiting.result(60)
    with pytest.raises(EngineDead, match=r"rank 1 \(127.0.0.1\) has gone"):
        leader.receive_hidden()
    leader.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"multi_process": True, "tensor_parallel_size": 2}, "leave multi_process out"),
        ({"nnodes": 3}, "pipeline_parallel_size 2: each stage is a process, and nnodes is 3: make them equal"),
        ({"data_parallel_size": 2}, "data_parallel_size 2: such engines are of one process each"),
        ({"device_ids": "0,1,2"}, "pipeline_parallel_size 2 and tensor_parallel_size 1 are 2 devices of each process"),
        ({"speculative_config": {"model": "m", "num_speculative_tokens": 2}}, "a draft model runs in one process so"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be at least 1, not 0"),
    ],
)
def test_what_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{"pipeline_parallel_size": 2, **settings})


@pytest.mark.parametrize("name", at_levels(["qwen3-vl", "qwen2_5-vl", "gemma3"], fast=["qwen3-vl"]))
def test_stages_see_pictures(name: str) -> None:
    """The first stage embeds a picture's rows; what is added after the first layers comes after those alone."""
    options = {"dtype": "float32", "page_size": 4, "max_logprobs": 320, "max_model_len": 160}
    options |= {"max_num_batched_tokens": 64, "kv_cache_memory_bytes": 2**21, "skip_tokenizer_init": False}
    with staged(SEEING / name, 2, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, logprobs=-1)
        for case in ("none", "two"):
            (output,) = llm.generate([test_images.prompt_of(name, case)], params, use_tqdm=False)
            test_images.check(name, case, output, prompt=False)
