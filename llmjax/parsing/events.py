"""What a parser makes of a model's text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of what was thought before it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call; its arguments follow.

    Args:
        name: name of the tool.
        id: None where the model has written none.
    """

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of the latest call's arguments, which are JSON when the model has written them so."""

    text: str


Event = Content | Reasoning | CallBegun | Arguments


def joined(events: Iterable[Event]) -> list[Event]:
    """The same events, with neighboring pieces of one text in one."""
    events_joined: list[Event] = []
    for kind, group in itertools.groupby(events, type):
        if kind is CallBegun:
            events_joined.extend(group)
        else:
            events_joined.append(kind("".join(event.text for event in group)))  # type: ignore[union-attr]
    return events_joined


@dataclass
class Call:
    """A tool call, as far as it has come."""

    name: str
    id: str | None = None
    arguments: str = ""


@dataclass
class Message:
    """Events put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    @staticmethod
    def of(events: Iterable[Event]) -> Message:
        message = Message()
        content: list[str] = []
        reasoning: list[str] = []
        arguments: list[list[str]] = []
        for event in events:
            match event:
                case Content(text):
                    content.append(text)
                case Reasoning(text):
                    reasoning.append(text)
                case CallBegun(name, id):
                    message.calls.append(Call(name, id))
                    arguments.append([])
                case Arguments(text):
                    arguments[-1].append(text)
        message.content, message.reasoning = "".join(content), "".join(reasoning)
        for call, pieces in zip(message.calls, arguments, strict=True):
            call.arguments = "".join(pieces)
        return message
