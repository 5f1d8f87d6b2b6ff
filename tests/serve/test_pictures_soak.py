"""Sixteen streams at once, half of them with pictures and a third of them given up, leave nothing behind."""

from __future__ import annotations

import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.engine.clients.test_process import alive
from tests.serve.pictures import golden, png, seeing, url_of, user
from tests.serve.test_run import children, process
from tests.waiting import until

STREAMS, ROUNDS = 16, 3
pytestmark = pytest.mark.slow


def streamed(url: str, number: int, pictures: list[str]) -> str | None:
    """What a request's stream says; every third one is given up after its first event."""
    own = [pictures[number // 2 % len(pictures)]] if number % 2 else []
    body = {"messages": user(*own), "max_tokens": 24, "temperature": 0, "stream": True, "ignore_eos": True}
    said: list[str] = []
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=None) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                said += [choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"]]
                if number % 3 == 0:
                    return None
    assert line in ("", "data: [DONE]")
    return "".join(said)


def gauge(url: str, name: str) -> float:
    found = re.search(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", httpx.get(f"{url}/metrics", timeout=None).text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_nothing_is_left(compile_cache_dir: str) -> None:
    config = seeing(compile_cache_dir, max_num_seqs=4, max_num_batched_tokens=32, kv_cache_memory_bytes=2**18)
    pictures = [url_of(png(golden(f"image{number}"))) for number in range(3)]
    with process(config) as (running, url):
        rounds: list[list[Any]] = []
        for _ in range(ROUNDS):
            with ThreadPoolExecutor(STREAMS) as threads:
                rounds.append(list(threads.map(lambda number: streamed(url, number, pictures), range(STREAMS))))
        assert all(answers == rounds[0] for answers in rounds)
        assert sum(answer is not None for answer in rounds[0]) == STREAMS - 6
        until(lambda: gauge(url, "num_requests_running") == gauge(url, "num_requests_waiting") == 0)
        until(lambda: gauge(url, "kv_cache_usage_perc") == 0)
        assert gauge(url, "mm_cache_queries_total") > 0
        started = children(running.pid)
        assert started
        running.send_signal(signal.SIGTERM)
        assert running.wait() == 0
        until(lambda: not any(alive(pid) for pid in started))
