"""Lines of a system prompt that change with every request, such as the time, are moved to the end of the conversation.

Agents write them at the head of each request. All that follows would have to be computed again: a prefix cache finds a
prompt's tokens as far as they are the same. At the end of the last message they cost only their own tokens, and the
model still reads them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

# A time of day, which is another one in the next request; a date alone holds for a day.
_NOW = r"(?:the )?(?:current|today'?s|local|system|utc|now)(?:\b|_)[\w ,'/()-]{0,40}"
_TIME = _NOW + r"(?: is|:|=|>).{0,40}\b\d{1,2}:\d\d.{0,40}"
_UNIX_TIME = r"(?:the )?(?:current |unix )*(?:time ?stamp|unix time)(?: is|:|=) ?\d{10,19}"
_ID = r"(?:request|trace|span|message|turn|nonce)(?:[ _-]?id)?(?: is|:|=) ?[\w-]{8,64}"
_AROUND = r"[\s*#<>`_\"',.;-]{0,8}"  # marks of lists, emphasis and tags
AUTO = f"{_AROUND}(?:{_TIME}|{_UNIX_TIME}|{_ID}){_AROUND}"
HEAD = frozenset({"system", "developer"})
ASKING = frozenset({"user", "tool"})
LONGEST = 256  # characters of a line that is looked at


@dataclass(frozen=True)
class VolatileLines:
    """Which lines are moved.

    Args:
        pattern: a regular expression that a whole line matches.
    """

    pattern: str = AUTO

    @cached_property
    def _line(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.IGNORECASE)

    @classmethod
    def of(cls, setting: str) -> VolatileLines | None:
        """The lines that ``--volatile-lines`` names: ``auto``, ``none`` or an expression, which has been checked."""
        if setting == "none":
            return None
        return cls() if setting == "auto" else cls(setting)

    def moved(self, messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
        """Messages with such lines of the leading system messages in one after the last that asks, and these lines.

        Nothing is moved where no user and no tool asks. A chat template that takes no system message there gets it as
        it gets all later ones.

        Args:
            messages: texts or parts with a ``type``, as `template_messages` makes them.
        """
        messages = list(messages)
        head = next((i for i, message in enumerate(messages) if message["role"] not in HEAD), len(messages))
        last = next((i for i in reversed(range(head, len(messages))) if messages[i]["role"] in ASKING), None)
        if last is None:
            return messages, []
        found: list[str] = []
        kept = [{**message, "content": self._without(message["content"], found)} for message in messages[:head]]
        if not found:
            return messages, []
        kept = [message for message in kept if message["content"]]
        lines = {"role": "system", "content": "\n".join(line.strip() for line in found)}
        return [*kept, *messages[head : last + 1], lines, *messages[last + 1 :]], found

    def _without(self, content: Any, found: list[str]) -> Any:
        match content:
            case str():
                kept: list[str] = []
                for line in content.split("\n"):
                    volatile = len(line) <= LONGEST and self._line.fullmatch(line)
                    (found if volatile else kept).append(line)
                return "\n".join(kept)
            case list():
                return [
                    {**part, "text": self._without(part["text"], found)} if part["type"] == "text" else part
                    for part in content
                ]
        return content
