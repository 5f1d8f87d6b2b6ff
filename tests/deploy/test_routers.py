"""Two servers and the routers of their users (``pip install vllm-router sglang-router``), as real processes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from llmjax.config import EngineConfig
from llmjax.engine.ranks.join import free_port
from tests.serve.conftest import write_llama, write_tokenizer
from tests.serve.test_run import process

pytestmark = pytest.mark.slow

HOST = "127.0.0.1"
SECONDS = 120.0
PAGE = 16
TOPICS = [f"{letter * 60} " for letter in "abcdefgh"]  # how conversations begin


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> EngineConfig:
    folder = tmp_path_factory.mktemp("model")
    write_llama(folder, vocab=write_tokenizer(folder))
    return EngineConfig(
        model=str(folder),
        dtype="float32",
        max_num_seqs=4,
        page_size=PAGE,
        kv_cache_memory_bytes=8 * 2**20,
        compilation_cache_dir=compile_cache_dir,
        served_model_name="tiny-llama",
    )


@contextmanager
def router(name: str, *flags: str) -> Iterator[str]:
    """A router, and its URL once it takes requests."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"there is no {name}")
    port = free_port(HOST)
    ports = ["--host", HOST, "--port", str(port), "--prometheus-port", str(free_port(HOST))]
    command = [sys.executable, "-m", f"{name}.launch_router", *ports, *flags]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    url, end = f"http://{HOST}:{port}", time.monotonic() + SECONDS
    try:
        while True:
            assert time.monotonic() < end and running.poll() is None, running.stdout and running.stdout.read()
            try:
                if httpx.get(f"{url}/readiness", timeout=SECONDS).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        yield url
    finally:
        running.kill()
        running.communicate()


def ask(url: str, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny-llama", "prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True} | fields
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=SECONDS).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


@pytest.mark.parametrize("name", ["vllm_router", "sglang_router"])
def test_conversations_stay_where_their_prefix_is_cached(config: EngineConfig, name: str) -> None:
    with ExitStack() as stack:
        urls = [stack.enter_context(process(config))[1] for _ in range(2)]
        flags = ["--policy", "cache_aware", "--cache-threshold", "0.5", "--worker-urls", *urls]
        front = stack.enter_context(router(name, *flags))
        with ThreadPoolExecutor(len(TOPICS)) as threads:  # at once: a router that sees no load takes the first server
            list(threads.map(lambda topic: ask(front, topic, max_tokens=150), TOPICS))
        cached = []
        for turn in (1, 2):
            for topic in TOPICS:
                usage = ask(front, topic + "and then " * turn)["usage"]
                cached.append((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))
        chat = {"model": "tiny-llama", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        assert httpx.post(f"{front}/v1/chat/completions", json=chat, timeout=SECONDS).status_code == 200
        counts = [metric(url, "vllm:request_success_total") for url in urls]
    assert sum(counts) == 3 * len(TOPICS) + 1
    assert min(counts) > 0  # both have some of the conversations
    assert min(cached) >= 2 * PAGE  # and all turns of each


def test_a_router_has_one_server_compute_prompts_and_the_other_go_on(config: EngineConfig) -> None:
    def transfer(role: str, **more: object) -> list[str]:
        return [
            "--master-secret",
            "a word that both know",
            "--kv-transfer-config",
            json.dumps({"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_size": 1e6, **more}),
        ]

    port = free_port(HOST)
    with ExitStack() as stack:
        prefill = stack.enter_context(process(config, *transfer("kv_producer", kv_port=port)))[1]
        decode = stack.enter_context(process(config, *transfer("kv_consumer", kv_peers=[f"{HOST}:{port}"])))[1]
        flags = ["--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode]
        front = stack.enter_context(router("vllm_router", *flags))
        for topic in TOPICS[:3]:
            found = ask(front, topic)["choices"][0]["text"]
            assert found == ask(prefill, topic)["choices"][0]["text"]
        taken = 'llmjax:kv_offload_hits_total{engine="0",model_name="tiny-llama",tier="remote"}'
        text = httpx.get(f"{decode}/metrics", timeout=SECONDS).text
    (line,) = [line for line in text.splitlines() if line.startswith(taken)]
    assert float(line.rsplit(" ", 1)[1]) >= 3 * 2 * PAGE
