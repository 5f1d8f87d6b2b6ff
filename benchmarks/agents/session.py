"""A session as it happened, whichever agent had it: what was asked, which tools were called, and what they gave."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

PHRASE = (
    "parse the tokens of a page return value where each row holds index and count before next block is read from "
    "file list of names with error when size limit below zero update cache write result check state lock thread"
)
WORDS = tuple(PHRASE.split())
BEGUN = datetime(2026, 11, 29, 9, 30, 12)


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call; ``properties`` are those of its JSON schema, all of them required."""

    name: str
    description: str
    properties: Mapping[str, Any]

    @property
    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": dict(self.properties),
            "required": list(self.properties),
            "additionalProperties": False,
        }


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of a tool and what came of it."""

    tool: str
    arguments: Mapping[str, Any]
    result: str
    failed: bool = False


@dataclass(frozen=True, kw_only=True)
class Step:
    """An answer of the model, with its calls and their results.

    Args:
        asked: what the user says before it; None: it goes on after the results of the step before.
        calls: none: the answer ends what was asked.
    """

    asked: str | None
    thought: str
    said: str
    calls: tuple[Call, ...]


@dataclass(frozen=True, kw_only=True)
class Session:
    """All of it, from which an agent's requests are written.

    Args:
        rules: the system prompt.
        files: what the agent shows of the project before the first question.
    """

    rules: str
    tools: tuple[Tool, ...]
    files: str
    steps: tuple[Step, ...]

    def requests(self) -> Iterator[tuple[tuple[Step, ...], str | None, datetime]]:
        """For each request the steps before it, the text that the user has just written, and the time."""
        for i, step in enumerate(self.steps):
            yield self.steps[:i], step.asked, BEGUN + timedelta(seconds=47 * i)


TOOLS = (
    Tool(name="read_file", description="Reads a file.", properties={"path": {"type": "string"}}),
    Tool(
        name="edit_file",
        description="Replaces a text of a file.",
        properties={name: {"type": "string"} for name in ("path", "old", "new")},
    ),
    Tool(
        name="shell",
        description="Runs a command.",
        properties={"command": {"type": "string"}, "seconds": {"type": "integer"}},
    ),
    Tool(
        name="todo",
        description="Keeps the list of what is left to do.",
        properties={"items": {"type": "array", "items": {"type": "string"}}},
    ),
)


def coding_session(*, turns: int, characters: int, seed: int = 0) -> Session:
    """A session in which files are read and changed, and tests run.

    Args:
        turns: requests to the model; every sixth begins with something that the user asks.
        characters: how long the last request is, without the schemas of tools; the first one has two thirds of that.
    """
    chance = random.Random(seed)
    standing, growing = 2 * characters // 3, characters // 3
    result = max(growing // turns - 120, 40)
    steps = tuple(
        Step(
            asked=_prose(chance, 80) if i % 6 == 0 else None,
            thought=_prose(chance, 60),
            said=_prose(chance, 40),
            calls=() if i % 6 == 5 else _calls(chance, i, result),
        )
        for i in range(turns)
    )
    return Session(rules=_prose(chance, standing // 2), tools=TOOLS, files=_code(chance, standing // 2), steps=steps)


def _calls(chance: random.Random, number: int, characters: int) -> tuple[Call, ...]:
    path = f"src/{chance.choice(WORDS)}.py"
    match number % 4:
        case 0:  # two at once
            return tuple(
                Call(tool="read_file", arguments={"path": name}, result=_code(chance, characters // 2))
                for name in (path, f"tests/test_{number}.py")
            )
        case 1:
            arguments = {"path": path, "old": _code(chance, 40), "new": _code(chance, 50)}
            return (Call(tool="edit_file", arguments=arguments, result="1 place was changed."),)
        case 2:
            arguments = {"command": f'pytest -k "{chance.choice(WORDS)}" | tail', "seconds": 60}
            return (Call(tool="shell", arguments=arguments, result=_code(chance, characters), failed=True),)
    items = [_prose(chance, 30) for _ in range(3)]
    return (Call(tool="todo", arguments={"items": items}, result=""),)


def _prose(chance: random.Random, characters: int) -> str:
    lines: list[str] = []
    while sum(map(len, lines)) < characters:
        lines.append(" ".join(chance.choices(WORDS, k=12)).capitalize() + ".")
    return "\n".join(lines)[:characters].strip()


def _code(chance: random.Random, characters: int) -> str:
    lines: list[str] = []
    while sum(map(len, lines)) < characters:
        a, b, c = chance.choices(WORDS, k=3)
        lines.append(f"    {a}_{b} = self.{c}({chance.randint(0, 999)}, {a!r})  # {b} → {c}")
    return "\n".join(lines)[:characters]
