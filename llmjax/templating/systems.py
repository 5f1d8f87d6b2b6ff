"""System messages, in the places where a template takes them.

Agents send them in the middle of a conversation, too, where many templates refuse them or leave them out. Their texts
then stand, marked, in a message beside their place: what came before keeps its place in the prompt, and with it in the
prefix cache, and no turn begins that the template would count.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

SYSTEM = "system"


class Systems(enum.Enum):
    """Where a template takes system messages."""

    ANYWHERE = "anywhere"
    BEGINNING = "beginning"  # several of them
    FIRST = "first"  # as the first message alone
    NOWHERE = "nowhere"


def placed(messages: Sequence[dict[str, Any]], systems: Systems) -> list[dict[str, Any]]:
    """The messages with all texts of system messages where the template takes them; the others keep their order."""
    if systems is Systems.ANYWHERE or not messages:
        return list(messages)
    begin = next((i for i, message in enumerate(messages) if message["role"] != SYSTEM), len(messages))
    leading = list(messages[:begin])
    if systems is not Systems.BEGINNING and len(leading) > 1:
        leading = [{**leading[0], "content": "\n\n".join(_text(message["content"]) for message in leading)}]
    rest = _without_later(messages[begin:])
    if systems is Systems.NOWHERE and leading:
        return _told(_text(leading[0]["content"]), rest)
    return [*leading, *rest]


def marked(text: str) -> str:
    """What a system message says, for a message of another role."""
    return f"<system>\n{text}\n</system>"


def _without_later(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    notes: list[str] = []
    for message in messages:
        if message["role"] == SYSTEM:
            notes.append(marked(_text(message["content"])))
            continue
        if notes and message["role"] != "tool":  # results directly follow their calls
            _add(turns, "\n\n".join(notes), [message])
            notes = []
        else:
            turns.append(message)
    if notes:
        _add(turns, "\n\n".join(notes), [])
    return turns


def _add(turns: list[dict[str, Any]], note: str, following: list[dict[str, Any]]) -> None:
    """Adds a note, and what follows it: to the last turn, or to the next one, or as a turn of the user."""
    before = turns[-1]["role"] if turns else None
    user_follows = bool(following) and following[0]["role"] == "user"
    if before == "user" or (before == "tool" and not user_follows):
        turns[-1] = {**turns[-1], "content": _joined(turns[-1]["content"], note)}
        turns += following
    else:
        turns += _told(note, following)


def _told(text: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, before which the user says a text."""
    if not messages or messages[0]["role"] != "user":
        return [{"role": "user", "content": text}, *messages]
    first, *rest = messages
    return [{**first, "content": _joined(text, first["content"])}, *rest]


def _joined(before: Any, behind: Any) -> Any:
    """Two contents as one: a text, or a list of parts where one of them is a list."""
    if isinstance(before, list) or isinstance(behind, list):
        return [*_parts(before), *_parts(behind)]
    return "\n\n".join(text for text in (before, behind) if text)


def _parts(content: Any) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def _text(content: Any) -> str:
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""
