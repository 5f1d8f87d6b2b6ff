"""What candle-vLLM's README has people send: its curl line, OpenAI's package, its chat script and its benchmark."""

from __future__ import annotations

import concurrent.futures
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from llmjax.cli.serve import serve_parser, settings
from llmjax.config import EngineConfig, ServerConfig
from tests.serve.conftest import CONTEXT, Running

RUST = [{"role": "user", "content": "Explain how to best learn Rust."}]


@pytest.fixture(scope="module")
def candle(engine_config: EngineConfig, start_server: Callable[..., Any]) -> Iterator[Running]:
    """A server as that README starts one."""
    line = ["--p", "2000", "--w", str(engine_config.model)]
    made = settings(serve_parser(), [*line, "--temperature", "0.", "--penalty", "1.0"])
    assert (made.server.port, made.engine.model) == (2000, engine_config.model)
    engine = engine_config.replace(
        served_model_name=made.engine.served_model_name,
        override_generation_config=made.engine.override_generation_config,
    )
    running, stop = start_server(engine, ServerConfig(port=0, cut_max_tokens=made.server.cut_max_tokens))
    yield running
    stop()


@pytest.fixture
def client(candle: Running, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package itself, as the README uses it; the address is this server's."""
    monkeypatch.setattr(openai, "api_key", "EMPTY")
    monkeypatch.setattr(openai, "base_url", f"{candle.url}/v1/")
    monkeypatch.setattr(openai, "_client", None)
    return openai.chat.completions


def test_the_curl_line(candle: Running) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("needs curl")
    body = {"model": "llama7b", "messages": RUST, "temperature": 0.7, "max_tokens": 128, "stop": {"Single": "</s>"}}
    headers = ["-H", "Content-Type: application/json", "-H", "Authorization: Bearer YOUR_API_KEY"]
    command = [curl, "-sS", "-X", "POST", f"{candle.url}/v1/chat/completions", *headers, "-d", json.dumps(body)]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    assert answer["object"] == "chat.completion" and answer["usage"]["completion_tokens"] <= 128
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_the_sample_of_openais_package(client: Any) -> None:
    completion = client.create(model="llama", messages=RUST, max_tokens=64)
    assert isinstance(completion.choices[0].message.content, str)
    assert completion.usage.completion_tokens <= 64


def test_the_chat_script(client: Any) -> None:
    """Which asks for 16,384 tokens, whatever the context holds, and reads the first choice of every chunk."""
    fields = ("top_k", "min_p", "frequency_penalty", "presence_penalty", "thinking", "repeat_last_n", "session_id")
    messages = list(RUST)
    for _ in range(2):
        stream = client.create(
            model="",
            messages=messages,
            stream=True,
            max_tokens=16384,
            temperature=None,
            top_p=None,
            extra_body=dict.fromkeys(fields),
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text
        messages += [{"role": "assistant", "content": text[:40]}, {"role": "user", "content": "And then?"}]


def test_the_benchmark(client: Any) -> None:
    def answer(number: int) -> str:
        prompt = f"Who is {number}? Respond in more than 60 words."
        messages = [{"role": "user", "content": prompt}]
        stream = client.create(model="any", messages=messages, max_tokens=64, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(answer, range(16)))
    assert all(answers)


def test_a_cut_answer_fills_the_context(candle: Running) -> None:
    with candle.http() as http:
        for path, body, field in (
            ("/v1/chat/completions", {"messages": RUST}, "max_completion_tokens"),
            ("/v1/completions", {"prompt": "the"}, "max_tokens"),
            ("/v1/chat/completions", {"messages": RUST, "truncate_prompt_tokens": -1}, "max_tokens"),
            ("/v1/completions", {"prompt": "the", "truncate_prompt_tokens": -1}, "max_tokens"),
        ):
            answer = http.post(path, json={**body, field: 10**6, "ignore_eos": True, "temperature": 0})
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["total_tokens"] == CONTEXT
            assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_other_servers_say_what_to_do(http: Any) -> None:
    error = http.post("/v1/chat/completions", json={"model": "llama", "messages": RUST}).json()["error"]
    assert "--served-model-name NAME '*'" in error["message"]
    error = http.post("/v1/chat/completions", json={"messages": RUST, "max_tokens": 16384}).json()["error"]
    assert "--cut-max-tokens" in error["message"] and error["param"] == "max_tokens"
