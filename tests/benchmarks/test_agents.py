"""Sessions of agents against a real server: no protocol error, and prompts come from the prefix cache."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic.types
import openai.types.chat
import openai.types.responses
import pytest
from pydantic import TypeAdapter

from benchmarks.agents.__main__ import Figures, main
from benchmarks.agents.dialects import DIALECTS, Request
from benchmarks.agents.replay import Turn, replay
from benchmarks.agents.session import coding_session
from llmjax.bench.client import OpenAIClient
from llmjax.config import EngineConfig, ServerConfig
from tests.serve.conftest import Running, start, write_llama, write_tokenizer

CONTEXT = 16384
EVENTS: dict[str, TypeAdapter[Any]] = {
    "/v1/chat/completions": TypeAdapter(openai.types.chat.ChatCompletionChunk),
    "/v1/responses": TypeAdapter(openai.types.responses.ResponseStreamEvent),
    "/v1/messages?beta=true": TypeAdapter(anthropic.types.RawMessageStreamEvent),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("agents") / "tiny-llama"
    folder.mkdir()
    write_llama(folder, vocab=write_tokenizer(folder))
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": CONTEXT}))
    engine = EngineConfig(
        model=str(folder),
        dtype="float32",
        max_model_len=CONTEXT,
        max_num_seqs=2,
        max_num_batched_tokens=512,
        page_size=16,
        kv_cache_memory_bytes=16 * 2**20,
        served_model_name="tiny *",
        compilation_cache_dir=compile_cache_dir,
    )
    running, stop = start(engine, ServerConfig(port=0))
    yield running
    stop()


def replayed(url: str, requests: list[Request]) -> list[Turn]:
    async def turns() -> list[Turn]:
        client = OpenAIClient(url)
        try:
            return await replay(client, requests)
        finally:
            await client.close()

    return asyncio.run(turns())


@pytest.mark.parametrize("agent", DIALECTS)
def test_a_session_is_served_from_the_prefix_cache(agent: str, server: Running) -> None:
    requests = list(DIALECTS[agent](coding_session(turns=20, characters=4000), "tiny", 4))
    turns = replayed(server.url, requests)
    assert len(turns) == 20
    for request, turn in zip(requests, turns, strict=True):
        for event in turn.events:
            EVENTS[request.path].validate_python(event)
    assert turns[-1].prompt_tokens > 3000
    assert Figures(turns=turns, alone=[]).cached >= 0.9  # with so few tokens half a page of each turn is lost
    server.wait_idle()


def test_volatile_lines_are_what_hides_a_session(server: Running) -> None:
    """The same without its rule: nothing after the time is found again."""
    session = coding_session(turns=6, characters=2000, seed=3)
    requests = list(DIALECTS["codex"](session, "tiny", 1))
    kept = [
        Request(
            path=request.path,
            headers=request.headers,
            body={**request.body, "instructions": request.body["instructions"].replace("Current time", "It was")},
        )
        for request in requests
    ]
    assert Figures(turns=replayed(server.url, kept), alone=[]).cached < 0.2
    assert Figures(turns=replayed(server.url, requests), alone=[]).cached > 0.8


def test_every_request_goes_on_with_the_one_before() -> None:
    """But for what an agent changes on purpose, nothing that was said before is said otherwise."""
    for agent, dialect in DIALECTS.items():
        bodies = [request.body for request in dialect(coding_session(turns=8, characters=3000), "m", 1)]
        field = "input" if agent == "codex" else "messages"
        for before, after in itertools.pairwise(bodies):
            end = -1 if agent == "aider" else None  # whose reminder is always last
            head = 2 if agent == "opencode" else 1  # system messages, in which the time stands
            said = _unmarked(before[field][head:end])
            assert _unmarked(after[field][head:])[: len(said)] == said, agent


def _unmarked(messages: Any) -> Any:
    """Messages without the marks that say where Anthropic is to cache."""
    match messages:
        case dict():
            return {key: _unmarked(value) for key, value in messages.items() if key != "cache_control"}
        case list():
            return [_unmarked(value) for value in messages]
    return messages


def test_the_table(server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "agents.json"
    flags = ["--agents", "cline", "--turns", "3", "--characters", "1000", "--max-tokens", "1", "--output-json"]
    assert main([server.url, *flags, str(result)]) == 0
    record = json.loads(result.read_text())["cline"]
    assert len(record["turns"]) == 3 and len(record["alone_seconds"]) == 2
    assert record["cached"] == pytest.approx(
        sum(turn["cached"] for turn in record["turns"][1:]) / sum(turn["prompt"] for turn in record["turns"][1:])
    )
    assert "cline" in capsys.readouterr().out
