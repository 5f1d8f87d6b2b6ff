"""A server without a model of its own, as Ollama's is: started, pulled into, asked, and started again."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import ollama
import pytest

from llmjax.config import EngineConfig
from tests.pulled.hosts import serving, tiny_gguf

ADMIN = "the-admin-key"
HELLO = [{"role": "user", "content": "w w"}]
NAME = "tiny:1b"


def command_of(downloads: Path, *flags: str) -> list[str]:
    program = [sys.executable, "-m", "serve", "--load", "demand", "--port", "0", "--download-dir", str(downloads)]
    return [*program, *flags]


@contextmanager
def server(downloads: Path, *flags: str) -> Iterator[tuple[str, list[str]]]:
    """A process that serves what has been pulled: its URL, and what it has printed before it answered."""
    command = command_of(downloads, "--admin-key", ADMIN, *flags)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    said: list[str] = []
    try:
        for line in process.stdout:
            said.append(line)
            if line.startswith(("or open ", "try: ")):
                break
        url = next(line.split()[-1].removesuffix("/v1") for line in said if " served at " in line)
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield url, said
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()


def empty(http: httpx.Client) -> None:
    """What a server says that has no models."""
    assert http.get("/health").status_code == 200
    assert http.get("/v1/models").json()["data"] == []
    of_anthropic = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert (of_anthropic["data"], of_anthropic["first_id"], of_anthropic["last_id"]) == ([], None, None)
    assert http.get("/api/tags").json() == {"models": []} == http.get("/api/ps").json()
    assert "llmjax:model_state" in http.get("/metrics").text
    assert http.get("/", headers={"accept": "text/html"}).text.startswith("<!doctype html>")
    assert "serves models that are pulled" in http.get("/", headers={"accept": "text/plain"}).text
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 3}),
        ("/api/chat", {"messages": HELLO}),
        ("/tokenize", {"prompt": "w"}),
    ):
        for named in ({}, {"model": "mine"}):
            answer = http.post(path, json={**body, **named})
            assert answer.status_code == 404, answer.text
            assert "this server has no models yet: POST /api/pull" in answer.text
            assert ("the model `mine` does not exist" in answer.text) == bool(named)
    assert http.get("/server_info").status_code == 404
    assert http.get("/props").status_code == 404


def test_a_server_begins_without_a_model(
    engine_config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    headers = {"authorization": f"Bearer {ADMIN}"}
    flags = ["--max-model-len", "64", "--max-num-seqs", "2", "--kv-cache-memory-bytes", "1MiB", "--keep-alive", "20m"]
    flags += ["--dtype", "float32", "--compile-threads", "1"]
    flags += ["--compilation-cache-dir", str(engine_config.compilation_cache_dir)]
    with serving() as hosts:
        hosts.publish("library/tiny:1b", {"model": tiny_gguf(tmp_path / "tiny.gguf")})
        flags += ["--ollama-registry", hosts.url]
        with (
            server(tmp_path / "downloads", *flags) as (url, said),
            httpx.Client(base_url=url, headers=headers, timeout=None) as http,
            ollama.Client(host=url, headers=headers, timeout=None) as client,
        ):
            assert said[0].startswith("models that are pulled are served at http://127.0.0.1:")
            assert said[1].startswith(f"pull one: curl {url}/api/pull ")
            empty(http)
            assert client.pull(NAME).status == "success"
            assert client.chat(NAME, HELLO, options={"num_predict": 2}).done
            without = http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2})
            assert (without.status_code, without.json()["model"]) == (200, NAME)
            assert [model.model for model in client.ps().models] == [NAME]
            (card,) = http.get("/v1/models").json()["data"]
            assert 300 < card["expires_in"] <= 1200  # of --keep-alive
            assert "POST /api/pull fetches others" in http.post("/tokenize", json={"model": "x", "prompt": "w"}).text
        with (
            server(tmp_path / "downloads", *flags) as (url, said),
            httpx.Client(base_url=url, headers=headers, timeout=None) as http,
            ollama.Client(host=url, headers=headers, timeout=None) as client,
        ):
            assert said[0].startswith(f"{NAME} is served at ")
            assert [model.model for model in client.list().models] == [NAME] and not client.ps().models
            assert client.generate(NAME, "w", options={"num_predict": 2}).done
            client.delete(NAME)
            empty(http)


def test_a_server_that_could_never_have_a_model_does_not_start(tmp_path: Path) -> None:
    done = subprocess.run(command_of(tmp_path), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert "llmjax: error: no model is named or has been pulled, and nobody may pull one" in done.stderr
    assert "  hint: give --admin-key WORD, or name a model" in done.stderr
