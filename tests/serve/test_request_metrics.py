"""Times in answers, on servers that give them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from llmjax.config import EngineConfig, ServerConfig
from llmjax.outputs import RequestMetrics
from llmjax.serve.generation import request_metrics

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NAMES = {"queue_time_ms", "time_to_first_token_ms", "generation_time_ms", "mean_itl_ms", "tokens_per_second"}


@pytest.fixture(scope="module")
def timed(engine_config: EngineConfig, start_server: Callable[..., Any]) -> Iterator[httpx.Client]:
    config = engine_config.replace(stream_interval=3)
    running, stop = start_server(config, ServerConfig(port=0, enable_per_request_metrics=True))
    with running.http() as client:
        yield client
    stop()


def test_the_formulas() -> None:
    times = RequestMetrics(arrival_time=1.0, first_scheduled_time=1.5, first_token_time=1.75, last_token_time=2.75)
    assert request_metrics(times, tokens=5) == {
        "queue_time_ms": 500.0,
        "time_to_first_token_ms": 250.0,
        "generation_time_ms": 1000.0,
        "mean_itl_ms": 250.0,
        "tokens_per_second": 4.0,
    }
    assert request_metrics(None, tokens=5) == dict.fromkeys(NAMES)
    assert request_metrics(times, tokens=1)["mean_itl_ms"] is None


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": [{"role": "user", "content": "Hello"}]}), (TEXT, {"prompt": "the"})]
)
def test_answers_have_times(timed: httpx.Client, path: str, body: dict[str, Any]) -> None:
    fields = {**body, "max_tokens": 8, "ignore_eos": True}
    found = timed.post(path, json=fields).json()["metrics"]
    assert found.keys() == NAMES and all(value >= 0 for value in found.values())
    assert timed.post(path, json={**fields, "n": 2}).json()["metrics"] is None
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with timed.stream("POST", path, json={**fields, **options}) as stream:
        chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert chunks[-1]["metrics"].keys() == NAMES and "metrics" not in chunks[0]


def test_streams_of_the_whole_server_come_in_larger_pieces(timed: httpx.Client) -> None:
    body = {"prompt": "the", "max_tokens": 10, "ignore_eos": True, "stream": True, "return_token_ids": True}
    with timed.stream("POST", TEXT, json={**body, "stream_interval": 1}) as stream:
        chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    counts = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
    assert sum(counts) == 10 and all(count >= 3 for count in counts[1:-1]) and len(counts) <= 5


def test_no_times_without_the_setting(http: httpx.Client) -> None:
    assert "metrics" not in http.post(TEXT, json={"prompt": "the", "max_tokens": 1}).json()
