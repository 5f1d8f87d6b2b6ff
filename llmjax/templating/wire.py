"""What the server and a rendering process say to each other: length-prefixed frames over a socket."""

from __future__ import annotations

import dataclasses
import enum
import marshal
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmjax.errors import InvalidRequest

MAX_DEPTH = 200  # of lists and objects in each other that are not of Python's own types
REPLY = struct.Struct("<B?Q")  # before a reply: status, whether the process ends now, bytes of the text that follows


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one rendering may take.

    Args:
        cpu_seconds: computing time, after which the process is killed.
        wall_seconds: time until the answer is there, however busy the machine is, and before that until a process is
            free.
        memory: bytes of address space of the process.
        chars: characters of the prompt.
        kept_memory: bytes that a process may keep resident; one that keeps more makes room for a fresh one.
    """

    cpu_seconds: float = 2.0
    wall_seconds: float = 30.0
    memory: int = 512 * 2**20
    chars: int = 16 * 2**20
    kept_memory: int = 128 * 2**20


class Status(enum.IntEnum):
    """How a rendering ended."""

    READY = 0  # sent once, when the process has started
    DONE = 1  # the text is the prompt
    REFUSED = 2  # the text says what is wrong with the messages
    FAILED = 3  # the text says what is wrong with the template


@dataclass(frozen=True, kw_only=True)
class RenderRequest:
    """One rendering.

    Args:
        source: the template.
        messages: OpenAI's form; None: only compile.
        variables: what the template sees besides ``messages``.
        continue_final_message: cut everything after the last message's text.
    """

    source: str
    messages: Sequence[Any] | None = None
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    continue_final_message: bool = False

    def to_bytes(self) -> bytes:
        """The request without its length. Text and lists are copied, not looked at: this takes the time of a copy.

        Raises:
            InvalidRequest: messages or variables hold what is not data, for example a function.
        """
        try:
            return self._dumped(self.messages, dict(self.variables))
        except ValueError:  # subclasses of str or dict, pydantic models
            return self._dumped(_plain(self.messages, "messages"), {n: _plain(v, n) for n, v in self.variables.items()})

    def _dumped(self, messages: Any, variables: Any) -> bytes:
        return marshal.dumps((self.source, messages, variables, self.continue_final_message))

    @staticmethod
    def from_bytes(data: bytes | bytearray) -> RenderRequest:
        """Only for the process: data that anybody could have written must not be read so."""
        source, messages, variables, continued = marshal.loads(data)
        return RenderRequest(source=source, messages=messages, variables=variables, continue_final_message=continued)


def _plain(value: Any, field: str, depth: int = 0) -> Any:
    """The same data in Python's own types."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{field} is nested more than {MAX_DEPTH} deep", field=field)
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int(value)
        case float():
            return float(value)
        case Mapping():
            return {_plain(key, field): _plain(item, field, depth + 1) for key, item in value.items()}
        case Sequence() if not isinstance(value, bytes | bytearray):
            return [_plain(item, field, depth + 1) for item in value]
    if callable(dump := getattr(value, "model_dump", None)):  # pydantic, as the openai package returns messages
        return _plain(dump(exclude_none=True), field, depth + 1)
    raise InvalidRequest(f"{field}: a {type(value).__name__} cannot be given to a chat template", field=field)
