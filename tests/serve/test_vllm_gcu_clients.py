"""What vLLM-GCU's README has people run: its server's line, and the requests of its ``vllm_utils.benchmark_serving``.

That program is vLLM's benchmark of its time with further sampling parameters in every body: it wants streams whose last
chunk alone has the usage, and counts tokens by it.
"""

from __future__ import annotations

import concurrent.futures
import json
import time
from typing import Any

import httpx
import pytest

from llmjax.cli.serve import serve_parser, settings
from tests.serve.conftest import CONTEXT, Running

SAMPLING = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "seed": 0,
    "temperature": 0.0,
}
"""What it adds to every request."""
INPUT, OUTPUT = 24, 16  # tokens: --random-input-len, --random-output-len
PROMPT = "hi" * INPUT  # --strict-in-out-len


def body(model: str, *, chat: bool, keep_special_tokens: bool) -> dict[str, Any]:
    """The body of a request, of backend ``vllm`` or ``openai-chat``."""
    content = [{"type": "text", "text": PROMPT}]
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": content}]} if chat else {"prompt": PROMPT}
    asked |= {"max_completion_tokens": OUTPUT} if chat else {"max_tokens": OUTPUT, "logprobs": None}
    return {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "skip_special_tokens": not keep_special_tokens,
        **asked,
        **SAMPLING,
    }


def told(url: str, path: str, asked: dict[str, Any]) -> tuple[str, list[float], int]:
    """What the benchmark takes from a stream: text, times of chunks with choices, and tokens by the usage."""
    text, times, tokens = "", [], -1
    headers = {"Authorization": "Bearer None"}  # of an OPENAI_API_KEY that is not set
    with httpx.stream("POST", url + path, json=asked, headers=headers, timeout=None) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            data = line.removeprefix("data: ").strip()
            if not data or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if chunk.get("choices"):
                times.append(time.perf_counter())
                choice = chunk["choices"][0]
                text += (choice["delta"].get("content") if "delta" in choice else choice.get("text")) or ""
            elif chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    return text, times, tokens


def test_the_servers_line() -> None:
    line = (
        "--model Qwen2.5-32B-Instruct-GPTQ-Int8 --tensor-parallel-size 2 --max-model-len 32768 --disable-log-requests "
        "--block-size=64 --dtype=float16 --device gcu --trust-remote-code"
    )
    engine = settings(serve_parser(), line.split()).engine
    assert (engine.tensor_parallel_size, engine.max_model_len, engine.page_size) == (2, 32768, 64)
    assert (engine.dtype, engine.device) == ("float16", "gcu")


@pytest.mark.parametrize(("path", "chat"), [("/v1/completions", False), ("/v1/chat/completions", True)])
@pytest.mark.parametrize("keep", [True, False])
def test_the_benchmarks_requests(running: Running, path: str, chat: bool, keep: bool) -> None:
    """Its first request alone, then the others at once: --num-prompts 8 at a rate without limit."""
    asked = body("tiny-llama", chat=chat, keep_special_tokens=keep)
    first = told(running.url, path, asked)
    text, times, tokens = first
    assert text and tokens == OUTPUT <= CONTEXT
    assert 1 <= len(times) <= OUTPUT + 1 + chat  # an end, and a role
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: told(running.url, path, asked), range(8)))
    assert [(answer[0], answer[2]) for answer in answers] == [(text, OUTPUT)] * 8  # greedy, with a seed


def test_its_profile_needs_a_key(running: Running) -> None:
    """--profile: it goes on where a server refuses."""
    asked = body("tiny-llama", chat=False, keep_special_tokens=True)
    answer = httpx.post(f"{running.url}/start_profile", json=asked, timeout=None)
    assert answer.status_code == 403 and "--admin-key" in answer.json()["error"]["message"]
