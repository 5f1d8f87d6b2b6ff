"""What the sessions of coding agents cost a server: protocol errors, the prefix cache, and first tokens.

    python -m benchmarks.agents URL [--agents claude-code codex] [--turns 20] [--characters 90000]

A session of each agent is replayed, request by request, each with all that was said before it, as agents send them; the
answers in the history are the session's own, so that all servers read the same. The table has, from the second request
on, the share of the prompts' tokens that came from the prefix cache, and the time to the first token over the time that
a prompt without a history takes that has as many tokens as were new. Ours, llama-server and vLLM's server speak these
APIs, each some of them; an agent whose API a server has not is a row that says so.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.agents.dialects import DIALECTS, Request
from benchmarks.agents.replay import Turn, replay
from benchmarks.agents.session import coding_session
from llmjax.bench.client import OpenAIClient, RequestFailed
from llmjax.bench.options import options_of
from llmjax.bench.report import check_writable, write_json
from llmjax.cli.parser import Parser, add_settings
from llmjax.config import setting
from llmjax.errors import ConfigError, LLMJaxError
from llmjax.settings import settings_of


@dataclass(frozen=True, kw_only=True)
class AgentsOptions:
    """What is replayed."""

    agents: Sequence[str] = setting(tuple(DIALECTS), f"of {', '.join(DIALECTS)}", section="agents")
    model: str | None = setting(None, "name that requests have (default: the first that the server lists)")
    api_key: str | None = setting(None, "key of the server")
    turns: int = setting(20, "requests of a session", low=2)
    characters: int = setting(90_000, "of the last request: about 30,000 tokens", low=1000)
    max_tokens: int = setting(16, "tokens of each answer", low=1)
    seed: int = setting(0, "of the sessions' texts", low=0)
    output_json: str | None = setting(None, "file for all figures as JSON")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What is told of an agent's session.

    Args:
        alone: seconds to the first token of prompts without history that have the tokens that were new, by turn.
    """

    turns: list[Turn]
    alone: list[float]

    @property
    def cached(self) -> float:
        """The cached share of the tokens of all prompts but the first."""
        later = self.turns[1:]
        return sum(turn.cached_tokens for turn in later) / sum(turn.prompt_tokens for turn in later)

    @property
    def ratios(self) -> list[float]:
        return [turn.first_seconds / alone for turn, alone in zip(self.turns[1:], self.alone, strict=True)]


async def figures_of(client: OpenAIClient, agent: str, options: AgentsOptions, model: str) -> Figures:
    """Replays an agent's session.

    Raises:
        RequestFailed: the server refuses a request or breaks off its answer.
    """
    session = coding_session(turns=options.turns, characters=options.characters, seed=options.seed)
    turns = await replay(client, DIALECTS[agent](session, model, options.max_tokens))
    whole = coding_session(turns=2, characters=options.characters, seed=options.seed + 1).files
    per_token = options.characters / turns[-1].prompt_tokens
    alone = []
    for turn in turns[1:]:
        text = f"{uuid.uuid4().hex} {whole}"[: max(int(per_token * turn.new_tokens), 1)]
        (first,) = await replay(client, [_plain(text, model)])
        alone.append(first.first_seconds)
    return Figures(turns=turns, alone=alone)


def _plain(text: str, model: str) -> Request:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    more = {"stream": True, "stream_options": {"include_usage": True}}
    return Request(path="/v1/chat/completions", headers={}, body={**body, **more})


async def run(url: str, options: AgentsOptions, console: Console) -> dict[str, Any]:
    """Replays all sessions and prints the table.

    Raises:
        RequestFailed: the server cannot be reached.
    """
    client = OpenAIClient(url, api_key=options.api_key)
    table = Table("agent", box=box.SIMPLE, title=f"{options.turns} requests of each agent", title_justify="left")
    for name in ("tokens of the last", "cached", "first token, ms", "over new tokens alone: median", "most"):
        table.add_column(name, justify="right")
    record: dict[str, Any] = {}
    try:
        model = options.model or await client.first_model()
        for agent in options.agents:
            try:
                found = await figures_of(client, agent, options, model)
            except RequestFailed as error:
                table.add_row(agent, str(error)[:100])
                record[agent] = {"error": str(error)}
                continue
            times = [turn.first_seconds for turn in found.turns[1:]]
            table.add_row(
                agent,
                f"{found.turns[-1].prompt_tokens:,}",
                f"{found.cached:.1%}",
                f"{1e3 * statistics.median(times):.0f}",
                f"{statistics.median(found.ratios):.2f}",
                f"{max(found.ratios):.2f}",
            )
            record[agent] = {
                "cached": found.cached,
                "turns": [
                    {"prompt": turn.prompt_tokens, "cached": turn.cached_tokens, "first_seconds": turn.first_seconds}
                    for turn in found.turns
                ],
                "alone_seconds": found.alone,
            }
    finally:
        await client.close()
    console.print(table)
    return record


def main(argv: list[str]) -> int:
    """Replays, prints the table, and returns the status: 1 where a server broke a session off.

    Raises:
        LLMJaxError: a setting is wrong, or the server cannot be reached.
    """
    parser = Parser(prog="python -m benchmarks.agents", description="Sessions of coding agents, replayed.")
    parser.add_argument("url", help="the server, such as http://127.0.0.1:8000")
    add_settings(parser, settings_of(AgentsOptions).values(), section="agents")
    values = parser.parse(argv)
    options = options_of(AgentsOptions, values)
    if unknown := {*options.agents} - DIALECTS.keys():
        raise ConfigError(f"--agents: {min(unknown)!r} is none of {', '.join(DIALECTS)}")
    check_writable(options.output_json)
    record = asyncio.run(run(values.url, options, Console()))
    if options.output_json is not None:
        write_json(Path(options.output_json), record)
    return int(any("error" in figures for figures in record.values()))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LLMJaxError as error:
        sys.exit(f"agents: error: {error}")
