"""A server in front of two engines, as real processes: metrics by engine, an engine that is killed, and both ends."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmjax.config import EngineConfig
from tests.engine.clients.test_process import alive
from tests.serve.test_run import ENDLESS, children, process, stream
from tests.waiting import until, until_ended


@pytest.fixture(scope="module")
def config(engine_config: EngineConfig) -> EngineConfig:
    return engine_config.replace(data_parallel_size=2, max_num_seqs=2, compile_threads=1)


@pytest.fixture(scope="module")
def server(config: EngineConfig) -> Iterator[tuple[int, str]]:
    """The server's process and its URL."""
    with process(config) as (running, url):
        yield running.pid, url
        engines = children(running.pid)
        assert len(engines) == 2
        running.send_signal(signal.SIGTERM)
        assert running.wait() == 0
        assert not any(alive(engine) for engine in engines)


def by_engine(url: str, name: str) -> dict[str, float]:
    """A metric's values, by label."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=None).text)
    return {
        sample.labels["engine"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and sample.labels.get("finished_reason", "length") == "length"
    }


def complete(url: str, prompt: list[int], count: int = 8) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=None)


@pytest.mark.slow
def test_metrics_have_a_label_for_each_engine(server: tuple[int, str]) -> None:
    _, url = server
    before = by_engine(url, "vllm:request_success_total")
    assert set(before) == {"0", "1"}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: complete(url, [40 + i] * 5), range(8)))
    assert Counter(answer.status_code for answer in answers) == {200: 8}
    after = by_engine(url, "vllm:request_success_total")
    grown = {number: after[number] - before[number] for number in after}
    assert sum(grown.values()) == 8 and min(grown.values()) > 0
    until(lambda: sum(by_engine(url, "vllm:generation_tokens_total").values()) >= 8 * 8)
    for name in (
        "num_requests_running",
        "kv_cache_usage_perc",
        "cache_config_info",
        "e2e_request_latency_seconds_count",
    ):
        assert set(by_engine(url, f"vllm:{name}")) == {"0", "1"}, name
    assert by_engine(url, "llmjax:engine_up") == {"0": 1, "1": 1}
    assert set(by_engine(url, "llmjax:engine_restarts_total")) == {"0", "1"}


def test_the_server_goes_on_without_an_engine_until_that_is_back(server: tuple[int, str]) -> None:
    pid, url = server
    restarts = sum(by_engine(url, "llmjax:engine_restarts_total").values())
    tokens = complete(url, [40, 41, 42]).json()["choices"][0]["text"]
    lines: list[list[str]] = [[], []]
    readers = [stream(url, each, **{**ENDLESS, "n": 16}) for each in lines]
    until(lambda: all(len(each) > 2 for each in lines))
    victim, _ = engines = children(pid)
    os.kill(victim, signal.SIGKILL)
    until(lambda: not all(reader.is_alive() for reader in readers))
    (dead,) = [each for each, reader in zip(lines, readers, strict=True) if not reader.is_alive()]
    assert dead[-1] == "data: [DONE]" and "stopped: its process was killed by SIGKILL" in dead[-2]
    assert httpx.get(f"{url}/health", timeout=None).status_code == 200
    until(lambda: sum(by_engine(url, "llmjax:engine_restarts_total").values()) == restarts + 1)
    assert by_engine(url, "llmjax:engine_up") == {"0": 1, "1": 1}
    assert complete(url, [40, 41, 42]).json()["choices"][0]["text"] == tokens
    now = children(pid)
    assert len(now) == 2 and len(set(now) & set(engines)) == 1 and not alive(victim)
    for reader in readers:
        reader.join()


def test_a_server_that_is_killed_leaves_no_engine_behind(config: EngineConfig) -> None:
    with process(config) as (running, url):
        assert httpx.get(f"{url}/health", timeout=None).status_code == 200
        engines = children(running.pid)
        assert len(engines) == 2
        running.kill()
        running.wait()
        for engine in engines:
            until_ended(engine)
