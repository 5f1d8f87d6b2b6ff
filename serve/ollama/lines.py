"""Answers in Ollama's form: objects, of which a stream has one in each line."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson

from llmjax.parsing.events import Arguments, Call, CallBegun, Content, Event, Reasoning
from llmjax.serve.context import RequestRecord
from llmjax.serve.errors import ApiError, ollama_error
from llmjax.serve.generation import Tally

Data = dict[str, Any]
MEDIA_TYPE = "application/x-ndjson"


def line(data: Data) -> bytes:
    """An object as a line of a stream."""
    return orjson.dumps(data) + b"\n"


def error_line(failure: ApiError) -> bytes:
    """An error as a line of a stream."""
    return line(ollama_error(failure))


def now() -> str:
    """The time, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass(kw_only=True)
class LineWriter:
    """Turns what a model says into the objects of an answer.

    Args:
        model: its name.
        chat: messages of a chat; otherwise texts of `/api/generate`.
    """

    model: str
    chat: bool
    _calls: list[Call] = field(default_factory=list)

    def write(self, events: Iterable[Event]) -> list[Data]:
        """The objects of what comes next. A call is one object, which comes when the answer has ended."""
        found = []
        for event in events:
            match event:
                case Content(text):
                    found.append(self._part(content=text))
                case Reasoning(text):
                    found.append(self._part(thinking=text))
                case CallBegun(name, id):
                    self._calls.append(Call(name, id))
                case Arguments(text):
                    self._calls[-1].arguments += text
        return found

    def finish(self, *, reason: str, counts: Data) -> list[Data]:
        """The objects that end an answer.

        Args:
            reason: OpenAI's word for why it has ended.
            counts: see `counts_of`.
        """
        calls = [self._part(calls=self._calls)] if self._calls else []
        end = self._part() | {"done": True, "done_reason": "length" if reason == "length" else "stop", **counts}
        return [*calls, end]

    def whole(self, objects: list[Data]) -> Data:
        """All objects of an answer as one."""
        *parts, end = objects
        if not self.chat:
            texts = {name: "".join(part.get(name, "") for part in parts) for name in ("response", "thinking")}
            return end | {name: text for name, text in texts.items() if text or name == "response"}
        messages = [part["message"] for part in parts]
        message: Data = {"role": "assistant", "content": "".join(each["content"] for each in messages)}
        if thinking := "".join(each.get("thinking", "") for each in messages):
            message["thinking"] = thinking
        if calls := [call for each in messages for call in each.get("tool_calls", ())]:
            message["tool_calls"] = calls
        return end | {"message": message}

    def _part(self, *, content: str = "", thinking: str = "", calls: Iterable[Call] = ()) -> Data:
        said = {"thinking": thinking} if thinking else {}
        head = {"model": self.model, "created_at": now()}
        if not self.chat:
            return {**head, "response": content, **said, "done": False}
        shown = [_call(index, call) for index, call in enumerate(calls)]
        message = {"role": "assistant", "content": content, **said, **({"tool_calls": shown} if shown else {})}
        return {**head, "message": message, "done": False}


def _call(index: int, call: Call) -> Data:
    try:
        arguments = orjson.loads(call.arguments or "{}")
    except orjson.JSONDecodeError:  # it was cut, or the model cannot do better
        arguments = call.arguments
    arguments = arguments if isinstance(arguments, dict) else {"arguments": arguments}
    shown: Data = {"function": {"index": index, "name": call.name, "arguments": arguments}}
    return shown if call.id is None else {"id": call.id, **shown}


def counts_of(tally: Tally, record: RequestRecord) -> Data:
    """Tokens of an answer, and nanoseconds that they took: the prompt's from when it was begun, those of the answer
    from its first token."""
    times = record.times
    started, first, last = (
        (None,) * 3 if times is None else (times.first_scheduled_time, times.first_token_time, times.last_token_time)
    )
    return {
        "total_duration": since(record.started),
        "load_duration": 0,
        "prompt_eval_count": tally.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(started, first),
        "eval_count": tally.completion_tokens,
        "eval_duration": _nanoseconds(first, last),
    }


def since(started: float) -> int:
    """Nanoseconds since a moment of `time.perf_counter`."""
    return _nanoseconds(started, time.perf_counter())


def _nanoseconds(start: float | None, end: float | None) -> int:
    """The time between two moments; 0 where one is not known."""
    return 0 if start is None or end is None else int(1e9 * max(0.0, end - start))
