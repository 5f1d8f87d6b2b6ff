"""An answer in Anthropic's blocks, and the events that tell of each."""

from __future__ import annotations

from typing import Any

import orjson

from llmjax.parsing.events import Arguments, CallBegun, Content, Event, Reasoning
from llmjax.serve.messages.call_ids import shown_id
from llmjax.serve.sealing import sealed

Data = dict[str, Any]


class MessageWriter:
    """Turns what a model says into a message.

    Every method returns the events of the change.

    Args:
        message: its fields, but those that tell what it says and how it ends.
        show_thinking: say what was thought; otherwise its blocks are empty, and only signed.
    """

    def __init__(self, message: Data, *, show_thinking: bool) -> None:
        self.message: Data = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
        self._show_thinking = show_thinking
        self._block: Data | None = None
        self._pieces: list[str] = []

    def begin(self, usage: Data) -> list[Data]:
        """The answer begins."""
        return [{"type": "message_start", "message": {**self.message, "content": [], "usage": usage}}]

    def write(self, event: Event) -> list[Data]:
        """The next of what the model says."""
        match event:
            case Content(text):
                return [
                    *self._opened({"type": "text", "text": ""}),
                    self._piece(text, {"type": "text_delta", "text": text}),
                ]
            case Reasoning(text):
                opening = self._opened({"type": "thinking", "thinking": "", "signature": ""})
                delta = self._piece(text, {"type": "thinking_delta", "thinking": text})
                return [*opening, delta] if self._show_thinking else opening
            case CallBegun(name, id):
                call = {"type": "tool_use", "id": shown_id(id or ""), "name": name, "input": {}}
                return [*self._close(), *self._begin(call)]
            case Arguments(text):
                return [self._piece(text, {"type": "input_json_delta", "partial_json": text})]

    def finish(self, *, reason: str, sequence: str | None, usage: Data) -> list[Data]:
        """The answer has ended.

        Args:
            reason: Anthropic's.
            sequence: the stop sequence that ended it, if one did.
        """
        events = self._close()
        if not self.message["content"]:  # it said nothing: that is a text too
            events += [*self._begin({"type": "text", "text": ""}), *self._close()]
        end = {"stop_reason": reason, "stop_sequence": sequence}
        self.message |= {**end, "usage": usage}
        return [*events, {"type": "message_delta", "delta": end, "usage": usage}, {"type": "message_stop"}]

    def _opened(self, block: Data) -> list[Data]:
        if self._block is not None and self._block["type"] == block["type"]:
            return []
        return [*self._close(), *self._begin(block)]

    def _begin(self, block: Data) -> list[Data]:
        self._block = block
        return [{"type": "content_block_start", "index": len(self.message["content"]), "content_block": block}]

    def _delta(self, delta: Data) -> Data:
        return {"type": "content_block_delta", "index": len(self.message["content"]), "delta": delta}

    def _piece(self, text: str, delta: Data) -> Data:
        self._pieces.append(text)
        return self._delta(delta)

    def _close(self) -> list[Data]:
        if (block := self._block) is None:
            return []
        text = "".join(self._pieces)
        events: list[Data] = []
        match block["type"]:
            case "text":
                block = {**block, "text": text}
            case "thinking":
                block = {**block, "thinking": text if self._show_thinking else "", "signature": sealed(text)}
                events.append(self._delta({"type": "signature_delta", "signature": block["signature"]}))
            case _:
                block = {**block, "input": _arguments(text)}
        events.append({"type": "content_block_stop", "index": len(self.message["content"])})
        self.message["content"].append(block)
        self._block = None
        self._pieces = []
        return events


def _arguments(text: str) -> Data:
    """Arguments as an object; what is not JSON, because it was cut or the model cannot do better, is shown as it is."""
    try:
        value = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        value = text
    return value if isinstance(value, dict) else {"arguments": value}
