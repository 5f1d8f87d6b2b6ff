"""Three models as real processes under memory for two, with requests at random and engines that are killed."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from llmjax.config import EngineConfig
from llmjax.engine.clients import client
from llmjax.engine.loading.need import PROCESS_BYTES
from llmjax.several import pool
from llmjax.several.processes import ProcessLoading
from tests.engine.clients.test_process import alive
from tests.serve.conftest import children
from tests.waiting import until, until_async

NAMES = ("one", "two", "three")
REFUSED = {"model_unavailable", "engine_dead"}  # of a request that meets a death, or a pause after one


@contextmanager
def server(engine_config: EngineConfig, folder: Path, **settings: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of three models, of which memory holds two, and its URL."""
    for name in NAMES:
        shutil.copytree(engine_config.model, folder / name)
    both = int(2.5 * (PROCESS_BYTES + engine_config.kv_cache_memory_bytes))  # type: ignore[operator]
    content = {
        "port": 0,
        "models_memory_bytes": both,
        "dtype": "float32",
        "max_model_len": engine_config.max_model_len,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "page_size": 16,
        "kv_cache_memory_bytes": engine_config.kv_cache_memory_bytes,
        "compilation_cache_dir": engine_config.compilation_cache_dir,
        "compile_threads": 1,
        "access_log": False,
        "models": {name: {"model": str(folder / name), "load": "demand"} for name in NAMES},
        **settings,
    }
    file = folder / "models.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "serve", "--config", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if " are served at " in line:
                assert line.startswith("one, two, three are served at http://127.0.0.1:")
                threading.Thread(target=process.stdout.read, daemon=True).start()
                yield process, line.split()[-1].removesuffix("/v1")
                return
        pytest.fail("the server did not start")
    finally:
        process.kill()
        process.wait()


def ask(url: str, model: str, *, stream: bool, tokens: int) -> str:
    """How a request ends."""
    body = {"model": model, "prompt": [40, 41], "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=None)
    if answer.status_code == 503:
        time.sleep(int(answer.headers.get("retry-after", 1)))  # as clients do
        return str(answer.json()["error"]["code"])
    assert answer.status_code == 200, answer.text
    if not stream:
        assert answer.json()["model"] == model
        return str(answer.json()["choices"][0]["finish_reason"])
    assert answer.text.endswith("data: [DONE]\n\n")
    return next((code for code in REFUSED if f'"{code}"' in answer.text), "length")


def run(pid: int, url: str, *, requests: int, kills: int, seed: int) -> Counter[str]:
    """How requests have ended, each asked again until it is answered, while one engine after another is killed."""
    draw = random.Random(seed)
    ends: Counter[str] = Counter()
    lock = threading.Lock()

    def kill() -> None:
        if engines := children(pid):
            with suppress(ProcessLookupError):
                os.kill(draw.choice(engines), signal.SIGKILL)

    def answered(plan: tuple[str, bool, int]) -> None:
        model, stream, tokens = plan
        end = ""
        while end != "length":
            end = ask(url, model, stream=stream, tokens=tokens)
            with lock:
                ends[end] += 1
                if end == "length" and ends[end] % (requests // kills) == 0:
                    kill()
            assert end in {"length", *REFUSED}

    plans = [(draw.choice(NAMES), draw.random() < 0.5, draw.choice([1, 4, 60])) for _ in range(requests)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(answered, plans))
    return ends


def check(pid: int, url: str, process: subprocess.Popen[str]) -> None:
    """All models answer again, nothing is held that should not be, and nothing is left behind."""
    cards = {card["id"]: card for card in httpx.get(f"{url}/v1/models", timeout=None).json()["data"]}
    assert set(cards) == set(NAMES)
    for name in NAMES:
        until(lambda name=name: ask(url, name, stream=False, tokens=1) == "length")  # type: ignore[misc]
    assert httpx.get(f"{url}/health", timeout=None).status_code == 200
    states = Counter(card["state"] for card in httpx.get(f"{url}/v1/models", timeout=None).json()["data"])
    assert 1 <= states["loaded"] + states["sleeping"] <= 2
    until(lambda: len(children(pid)) <= 2)
    engines = children(pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert not any(alive(engine) for engine in engines)


def test_requests_end_while_models_come_go_and_die(engine_config: EngineConfig, tmp_path: Path) -> None:
    with server(engine_config, tmp_path) as (process, url):
        ends = run(process.pid, url, requests=20, kills=2, seed=1)
        assert ends["length"] == 20
        check(process.pid, url, process)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [2, 3])
def test_two_hundred_requests_end(engine_config: EngineConfig, tmp_path: Path, seed: int) -> None:
    with server(engine_config, tmp_path) as (process, url):
        ends = run(process.pid, url, requests=200, kills=20, seed=seed)
        assert ends["length"] == 200
        check(process.pid, url, process)


def test_a_model_whose_files_are_missing_leaves_the_others(engine_config: EngineConfig, tmp_path: Path) -> None:
    with server(engine_config, tmp_path) as (process, url):
        shutil.rmtree(tmp_path / "two")
        assert ask(url, "two", stream=False, tokens=1) == "model_unavailable"
        assert ask(url, "one", stream=False, tokens=1) == "length"
        card = httpx.get(f"{url}/v1/models/two", timeout=None).json()
        assert card["state"] == "failed" and card["failure"] == "it could not be loaded; the server's log says why"
        shutil.copytree(tmp_path / "one", tmp_path / "two")
        until(lambda: ask(url, "two", stream=True, tokens=1) == "length")
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


@pytest.mark.slow
async def test_a_process_that_hangs_is_ended_and_the_others_go_on(
    engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is stopped is alive and answers nothing, as one whose step never ends."""
    monkeypatch.setattr(pool, "LOOK_SECONDS", 0.2)
    memory = 8 * (PROCESS_BYTES + 2**30)
    begun: dict[str, list[ProcessLoading]] = {"one": [], "two": []}

    def begin(name: str) -> ProcessLoading:
        loading = ProcessLoading(engine_config.replace(engine_process="process"), name=name, memory=memory)
        begun[name].append(loading)
        return loading

    models = pool.ModelPool(dict.fromkeys(begun, pool.Manners()), begin, memory=memory, patience=600.0)
    await models.start()
    hung = begun["one"][0]._process.pid
    os.kill(hung, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(client, "STUCK_AFTER", 20.0)
        await until_async(lambda: models.models["one"].phase == "failed")
    assert "in one step for more than 20 s, and was ended" in models.models["one"].failure
    assert not alive(hung) and models.models["two"].phase == "loaded"
    await until_async(lambda: models.models["one"].retry_at <= asyncio.get_running_loop().time())
    for name in ("one", "two"):
        async with models.using(name) as engine:
            assert not engine.is_sleeping
    assert [len(loadings) for loadings in begun.values()] == [2, 1]
    await models.shutdown()
