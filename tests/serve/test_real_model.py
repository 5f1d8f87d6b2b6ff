"""SmolLM2 on a server: what a user sees after ``make serve``."""

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


def detokenized(http: Any, tokens: list[str]) -> str:
    """The text of tokens that an answer names as ``token_id:17``."""
    ids = [int(token.removeprefix("token_id:")) for token in tokens]
    text: str = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    return text


# Each answer is held against its own tokens: two runs of this model may part at a near tie, since the second finds the
# pages of the first, has other numbers of rows, and so is rounded in another way.


def test_answers_whole_and_streamed(smollm2: Any) -> None:
    with smollm2.client() as client, smollm2.http() as http:
        arguments: dict[str, Any] = {
            "model": "smollm2",
            "messages": QUESTION,
            "temperature": 0,
            "max_tokens": 24,
            "logprobs": True,
            "extra_body": {"return_tokens_as_token_ids": True},
        }
        whole = client.chat.completions.create(**arguments).choices[0]
        assert whole.finish_reason == "stop", "the end-of-turn token ends the answer"
        choices = [c for chunk in client.chat.completions.create(**arguments, stream=True) for c in chunk.choices]
        streamed = "".join(choice.delta.content or "" for choice in choices)
        logged = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
        for text, entries in ((whole.message.content, whole.logprobs.content), (streamed, logged)):
            assert "Paris" in text
            assert detokenized(http, [entry.token for entry in entries]) == f"{text}<|im_end|>"


def test_characters_of_several_tokens_are_streamed_whole(smollm2: Any) -> None:
    text = "日本語 👩‍👩‍👧 ё"
    with smollm2.http() as http:
        ids = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == text
        body = {
            "prompt": text * 3,
            "max_tokens": 24,
            "temperature": 0,
            "logprobs": 0,
            "return_tokens_as_token_ids": True,
        }
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
        streamed = [choice for line in lines for choice in json.loads(line)["choices"]]
        pieces = [choice["text"] for choice in streamed]
        tokens = [t for choice in streamed for t in (choice["logprobs"] or {}).get("tokens", [])]
        assert len(tokens) == 24
        assert "".join(pieces) == detokenized(http, tokens)
        whole = http.post("/v1/completions", json=body).json()["choices"][0]
        assert whole["text"] == detokenized(http, whole["logprobs"]["tokens"])
