"""Sessions of agents against a real server: no protocol error, and prompts come from the prefix cache."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agents.__main__ import main, servers_of
from benchmarks.agents.dialects import DIALECTS, Request
from benchmarks.agents.events import first_error
from benchmarks.agents.figures import Figures
from benchmarks.agents.replay import Turn, replay
from benchmarks.agents.session import coding_session
from llmjax.bench.client import OpenAIClient
from llmjax.config import EngineConfig, ServerConfig
from llmjax.errors import ConfigError
from tests.benchmarks.broken_histories import BROKEN, gone_on
from tests.serve.conftest import Running, start, write_llama, write_tokenizer

CONTEXT = 16384


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
        assert first_error(request.path, turn.events) is None
    assert turns[-1].prompt_tokens > 3000
    assert Figures(turns=turns).cached >= 0.9  # with so few tokens half a page of each turn is lost
    server.wait_idle()


@pytest.mark.parametrize("agent", DIALECTS)
def test_broken_histories_are_read_and_gone_on_with(agent: str, server: Running) -> None:
    session = coding_session(turns=8, characters=2000, seed=5)
    *_, whole = DIALECTS[agent](session, "tiny", 4)
    requests = [whole]
    for broken in BROKEN.values():
        body = broken(whole.body)
        requests += [replace(whole, body=body), replace(whole, body=gone_on(body))]
    first, *turns = replayed(server.url, requests)
    for request, turn in zip(requests, [first, *turns], strict=True):
        assert first_error(request.path, turn.events) is None
    assert turns[0].new_tokens <= 16  # the same again: what does not fill a page
    for before, after in zip(turns[::2], turns[1::2], strict=True):
        # The next turn has another end, which is an answer's beginning and, with some agents, a line that was moved.
        assert after.prompt_tokens > before.prompt_tokens and after.cached_tokens > before.prompt_tokens - 128
    server.wait_idle()


@pytest.mark.parametrize("agent", DIALECTS)
def test_histories_are_broken(agent: str) -> None:
    """Each change makes another body, but where an agent has no results of its own."""
    *_, whole = DIALECTS[agent](coding_session(turns=8, characters=2000, seed=5), "tiny", 4)
    same = {name for name, broken in BROKEN.items() if broken(whole.body) == whole.body}
    assert same == {"repeated"} | ({"out of order"} if agent in ("cline", "aider") else set())


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
    assert Figures(turns=replayed(server.url, kept)).cached < 0.2
    assert Figures(turns=replayed(server.url, requests)).cached > 0.8


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
    """One server has two names: what is replayed under the second is in the cache already."""
    result = tmp_path / "agents.json"
    flags = ["--agents", "cline", "--turns", "3", "--characters", "1000", "--max-tokens", "1", "--output-json"]
    assert main([f"one={server.url}", f"two={server.url}", *flags, str(result)]) == 0
    record = json.loads(result.read_text())["cline"]
    assert list(record) == ["one", "two"] and not record["one"]["errors"]
    for found in record.values():
        assert len(found["turns"]) == 3 and len(found["alone_seconds"]) == 2
        assert all(0 < turn["computed_seconds"] < turn["first_seconds"] for turn in found["turns"])
        assert found["cached"] == pytest.approx(
            sum(turn["cached"] for turn in found["turns"][1:]) / sum(turn["prompt"] for turn in found["turns"][1:])
        )
    assert record["two"]["turns"][0]["cached"] > 0.9 * record["two"]["turns"][0]["prompt"]
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("cline", "one", "two"))


def test_what_is_not_computing_is_told_apart() -> None:
    """The difference is taken turn by turn. Neither the first turn counts nor one whose computing no server tells."""

    def turn(first: float, computed: float | None) -> Turn:
        return Turn(prompt_tokens=9, cached_tokens=8, first_seconds=first, computed_seconds=computed, events=[])

    figures = Figures(turns=[turn(9, 1), turn(5, 4.5), turn(2, 1.25), turn(8, None), turn(4, 1), None])
    assert (figures.computed_seconds, figures.other_seconds, figures.over_computed) == (1.25, 0.75, 1.6)
    assert Figures(turns=[turn(1, None), turn(1, None)]).other_seconds is None


def test_an_error_is_counted_and_told(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--agents", "aider", "--turns", "2", "--characters", "1000", "--no-alone"]
    assert main([server.url, *flags, "--max-tokens", str(2 * CONTEXT)]) == 1
    shown = capsys.readouterr().out
    assert "max_tokens" in shown and "aider" in shown


def test_an_event_of_another_type_is_an_error() -> None:
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": []}
    assert first_error("/v1/chat/completions", [chunk]) is None
    wrong = first_error("/v1/chat/completions", [chunk, {**chunk, "choices": [{"index": "first", "delta": {}}]}])
    assert wrong is not None and "index" in wrong
    wrong = first_error("/v1/responses", [{"type": "response.completed", "sequence_number": "last"}])
    assert wrong is not None and "ResponseCompletedEvent" in wrong


def test_servers_are_named_by_their_addresses_or_otherwise() -> None:
    assert servers_of(["http://a:1/?x=1", "b=http://b:2"]) == {"http://a:1/?x=1": "http://a:1/?x=1", "b": "http://b:2"}
    with pytest.raises(ConfigError, match="names two servers"):
        servers_of(["b=http://a:1", "b=http://b:2"])
