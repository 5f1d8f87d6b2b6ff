"""What the sessions of coding agents cost a server: protocol errors, the prefix cache, and first tokens.

    python -m benchmarks.agents llmjax=http://127.0.0.1:8000 llama-server=http://127.0.0.1:8080 [--agents codex,aider]

A session of each agent is replayed, request by request, each with all that was said before it, as agents send them; the
answers in the history are the session's own, so that all servers read the same, in turns. From the second request on,
the table has the share of the prompts' tokens that came from the prefix cache, and the time to the first token:
beside the first server's; what of it the engine took to compute the new tokens with their attention to the history,
as a server says at /metrics, and what the rest took; how many times the computing it is; and how many times the first
token of a prompt without a history that has as many tokens as were new. Ours, llama-server and vLLM's server speak
these APIs, each some of them; an agent whose API a server has not is a row that says so.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.agents.dialects import DIALECTS, Request
from benchmarks.agents.events import first_error
from benchmarks.agents.figures import Figures
from benchmarks.agents.replay import Turn, replay_one
from benchmarks.agents.session import coding_session
from llmjax.bench.client import OpenAIClient, RequestFailed
from llmjax.bench.options import options_of
from llmjax.bench.report import check_writable, write_json
from llmjax.cli.parser import Parser, add_settings
from llmjax.config import setting
from llmjax.errors import ConfigError, LLMJaxError
from llmjax.settings import settings_of

WIDTH = 140  # characters of the table


@dataclass(frozen=True, kw_only=True)
class AgentsOptions:
    """What is replayed."""

    agents: Sequence[str] = setting(tuple(DIALECTS), f"of {', '.join(DIALECTS)}", section="agents")
    model: str | None = setting(None, "name that requests have (default: the first that each server lists)")
    api_key: str | None = setting(None, "key of the servers")
    turns: int = setting(20, "requests of a session", low=2)
    characters: int = setting(90_000, "of the last request: about 30,000 tokens", low=1000)
    max_tokens: int = setting(16, "tokens of each answer", low=1)
    seed: int = setting(0, "of the sessions' texts", low=0)
    alone: bool = setting(True, "ask for prompts without a history, too")
    output_json: str | None = setting(None, "file for all figures as JSON")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A server, and how it names its model."""

    client: OpenAIClient
    model: str


async def figures_of(asked: Mapping[str, Asked], agent: str, options: AgentsOptions) -> dict[str, Figures]:
    """Replays an agent's session at all servers, in turns."""
    session = coding_session(turns=options.turns, characters=options.characters, seed=options.seed)
    found: dict[str, tuple[list[Turn | None], list[str]]] = {name: ([], []) for name in asked}
    requests = {
        name: list(DIALECTS[agent](session, server.model, options.max_tokens)) for name, server in asked.items()
    }
    for number in range(options.turns):
        for name, server in asked.items():
            turns, errors = found[name]
            turns.append(await _turn(server.client, requests[name][number], errors))
    whole = coding_session(turns=2, characters=options.characters, seed=options.seed + 1).files
    alone: dict[str, list[float | None]] = {name: [] for name in asked}
    for number in range(1, options.turns if options.alone else 0):
        for name, server in asked.items():
            turns, errors = found[name]
            last, turn = next((turn for turn in reversed(turns) if turn is not None), None), turns[number]
            if turn is None or last is None:
                alone[name].append(None)
                continue
            characters = int(options.characters / last.prompt_tokens * turn.new_tokens)
            text = f"{uuid.uuid4().hex} {whole}"[: max(characters, 1)]
            first = await _turn(server.client, _plain(text, server.model), errors)
            alone[name].append(None if first is None else first.first_seconds)
    return {name: Figures(turns=turns, alone=alone[name], errors=errors) for name, (turns, errors) in found.items()}


async def _turn(client: OpenAIClient, request: Request, errors: list[str]) -> Turn | None:
    """A turn, and what is wrong with it; None: there is none."""
    try:
        turn = await replay_one(client, request, computed=True)
    except RequestFailed as error:
        errors.append(str(error))
        return None
    if (wrong := first_error(request.path, turn.events)) is not None:
        errors.append(wrong)
    return turn


def _plain(text: str, model: str) -> Request:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    more = {"stream": True, "stream_options": {"include_usage": True}}
    return Request(path="/v1/chat/completions", headers={}, body={**body, **more})


async def run(servers: Mapping[str, str], options: AgentsOptions, console: Console) -> dict[str, Any]:
    """Replays all sessions and prints the table.

    Args:
        servers: addresses by name, of which the first is what others are compared with.

    Returns:
        All figures, by agent and server.

    Raises:
        RequestFailed: a server cannot be reached.
    """
    clients = {name: OpenAIClient(url, api_key=options.api_key) for name, url in servers.items()}
    figures_by_agent: dict[str, dict[str, Figures]] = {}
    table = _table(f"{options.turns} requests of each agent", to=next(iter(servers)), several=len(servers) > 1)
    try:
        asked = {
            name: Asked(client=client, model=options.model or await client.first_model())
            for name, client in clients.items()
        }
        for agent in options.agents:
            figures_by_agent[agent] = found = await figures_of(asked, agent, options)
            first = next(iter(found.values()))
            for name, figures in found.items():
                table.add_row(agent, name, *_cells(figures, first if len(servers) > 1 else None))
    finally:
        for client in clients.values():
            await client.close()
    console.print(table)
    for agent, found in figures_by_agent.items():
        for name, figures in found.items():
            for error in dict.fromkeys(figures.errors):
                console.print(f"{agent}, {name}: {error[:200]}", highlight=False, markup=False)
    return {
        agent: {name: figures.record() for name, figures in found.items()} for agent, found in figures_by_agent.items()
    }


def _table(title: str, *, to: str, several: bool) -> Table:
    table = Table("agent", "server", box=box.SIMPLE, title=title, title_justify="left")
    beside = (f"median to {to}",) if several else ()
    split = ("of it computing", "the rest")
    first = ("first token: median, ms", "p95", *beside, *split, "over its computing", "over new tokens alone")
    for name in ("errors", "tokens of the last", "cached", *first):
        table.add_column(name, justify="right")
    return table


def _cells(figures: Figures, first: Figures | None) -> list[str]:
    """What the table says of a session.

    Args:
        first: the first server's figures; None: there is no other server.
    """
    errors = str(len(figures.errors))
    if not figures.later:
        return [errors]
    median = figures.first_seconds(50)
    beside = [] if first is None else [f"{median / first.first_seconds(50):.2f}" if first.later else "–"]
    ratios = [f"{ratio:.2f}" if ratio else "–" for ratio in (figures.over_computed, figures.over_alone)]
    times = [f"{1e3 * median:,.0f}", f"{1e3 * figures.first_seconds(95):,.0f}"]
    split = [f"{1e3 * part:,.0f}" if part else "–" for part in (figures.computed_seconds, figures.other_seconds)]
    return [errors, f"{figures.later[-1].prompt_tokens:,}", f"{figures.cached:.1%}", *times, *beside, *split, *ratios]


def servers_of(arguments: Sequence[str]) -> dict[str, str]:
    """Addresses by name, of ``NAME=URL`` and of plain addresses.

    Raises:
        ConfigError: two have one name.
    """
    servers: dict[str, str] = {}
    for argument in arguments:
        name, equals, url = argument.partition("=")
        if not equals or "/" in name:
            name, url = argument, argument
        if name in servers:
            raise ConfigError(f"{name} names two servers")
        servers[name] = url
    return servers


def main(argv: list[str]) -> int:
    """Replays, prints the table, and returns the status: 1 where there was an error.

    Raises:
        LLMJaxError: a setting is wrong, or a server cannot be reached.
    """
    parser = Parser(prog="python -m benchmarks.agents", description="Sessions of coding agents, replayed.")
    parser.add_argument("servers", nargs="+", help="servers, as http://127.0.0.1:8000 or NAME=http://127.0.0.1:8000")
    add_settings(parser, settings_of(AgentsOptions).values(), section="agents")
    values = parser.parse(argv)
    options = options_of(AgentsOptions, values)
    if unknown := {*options.agents} - DIALECTS.keys():
        raise ConfigError(f"--agents: {min(unknown)!r} is none of {', '.join(DIALECTS)}")
    servers = servers_of(values.servers)
    check_writable(options.output_json)
    record = asyncio.run(run(servers, options, Console(width=WIDTH)))
    if options.output_json is not None:
        write_json(Path(options.output_json), record)
    return int(any(one["errors"] for found in record.values() for one in found.values()))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LLMJaxError as error:
        sys.exit(f"agents: error: {error}")
