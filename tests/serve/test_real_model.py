"""SmolLM2 behind the server: what a user sees after ``make serve``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmjax.config import EngineConfig, ServerConfig

pytestmark = pytest.mark.real_model

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path, start_server: Any, compile_cache_dir: str) -> Iterator[Any]:
    config = EngineConfig(
        model=str(smollm2_path),
        max_model_len=256,
        max_num_seqs=1,
        max_num_batched_tokens=32,
        kv_cache_memory_bytes=64 * 2**20,
        compilation_cache_dir=compile_cache_dir,
        served_model_name="smollm2",
    )
    running, stop = start_server(config, ServerConfig(port=0))
    yield running
    stop()


def test_answers_whole_and_streamed(smollm2: Any) -> None:
    with smollm2.client() as client:
        arguments: dict[str, Any] = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 24}
        answer = client.chat.completions.create(**arguments)
        assert "Paris" in answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop", "the end-of-turn token ends the answer"
        chunks = list(client.chat.completions.create(**arguments, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content


def test_characters_of_several_tokens_are_streamed_whole(smollm2: Any) -> None:
    text = "日本語 👩‍👩‍👧 ё"
    with smollm2.http() as http:
        ids = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == text
        body = {"prompt": text * 3, "max_tokens": 24, "temperature": 0, "stream": True, "logprobs": 0}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
        whole = http.post("/v1/completions", json={**body, "stream": False}).json()["choices"][0]
    streamed = [choice for line in lines for choice in json.loads(line)["choices"]]
    assert "".join(choice["text"] for choice in streamed) == whole["text"]
    assert [t for choice in streamed for t in (choice["logprobs"] or {}).get("tokens", [])] == whole["logprobs"][
        "tokens"
    ]
