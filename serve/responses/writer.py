"""A response as it is written: its items, and the events that tell of each change."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmjax.parsing.events import Arguments, CallBegun, Content, Event, Reasoning
from llmjax.serve.custom_tools import InputReader
from llmjax.serve.errors import ApiError
from llmjax.serve.mcp.results import CallResult
from llmjax.serve.responses.approvals import REQUEST
from llmjax.serve.responses.conversation import PREFIXES, new_id, told_of
from llmjax.serve.responses.rounds import id_in_round, new_round
from llmjax.serve.sealing import sealed

Data = dict[str, Any]
WRITTEN = {
    "function_call": "arguments",
    "custom_tool_call": "input",
    "mcp_call": "arguments",
    REQUEST: "arguments",
}  # what a model writes of a call


@dataclass
class _Open:
    """The item that is being written.

    Args:
        item: as it was when it began.
        input: reads the input of a call to a custom tool.
        pieces: pieces of its text or its arguments.
        logprobs: log-probabilities of its tokens.
    """

    item: Data
    input: InputReader | None = None
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Data] = field(default_factory=list)


class ResponseWriter:
    """Turns what a model says into a response.

    Every method returns the events of the change, of which each has the next sequence number.

    Args:
        response: its fields, but those that tell how it ends.
        seal: give reasoning items their ``encrypted_content``.
        namespaces: namespace and name of each function that is in one, by what the model calls it.
        custom: what the model calls custom tools.
        mcp: label and name of each tool of a tool server, by what the model calls it.
        asking: what the model calls those of them whose calls need approval.
    """

    def __init__(
        self,
        response: Data,
        *,
        seal: bool,
        namespaces: Mapping[str, tuple[str, str]],
        custom: Collection[str] = (),
        mcp: Mapping[str, tuple[str, str]] | None = None,
        asking: Collection[str] = (),
    ) -> None:
        self.response: Data = {**response, "output": []}
        self._seal = seal
        self._namespaces = namespaces
        self._custom = custom
        self._mcp = mcp or {}
        self._asking = asking
        self._round = new_round()
        self._pending: list[int] = []  # places of calls that have been written and not made
        self._next = 0
        self._open: _Open | None = None

    def begin(self) -> list[Data]:
        """The response exists, and is worked on, or waits for that."""
        events = [self._lifecycle("created")]
        if self.response["status"] == "queued":
            events.append(self._lifecycle("queued"))
            self.response["status"] = "in_progress"
        return [*events, self._lifecycle("in_progress")]

    def write(self, event: Event, logprobs: list[Data]) -> list[Data]:
        """The next of what the model says.

        Args:
            logprobs: log-probabilities of a text's tokens.
        """
        match event:
            case Content(text):
                events = self._opened("message", self._message)
                assert self._open is not None
                self._open.logprobs += logprobs
                more = {"content_index": 0, "delta": text, "logprobs": logprobs}
                return [*events, self._piece("output_text.delta", text, more)]
            case Reasoning(text):
                events = self._opened("reasoning", self._reasoning)
                return [*events, self._piece("reasoning_text.delta", text, {"content_index": 0, "delta": text})]
            case CallBegun(name, id):
                return [*self._close("completed"), *self._begin(self._call(name, id))]
            case Arguments(text):
                assert self._open is not None
                if self._open.item["type"] == REQUEST:  # it is told of when it is whole
                    self._open.pieces.append(text)
                    return []
                if self._open.input is None:
                    kind = f"{self._open.item['type']}_arguments.delta"
                    return [self._piece(kind, text, {"delta": text})]
                return self._input(self._open.input.read(text))

    def list_tools(self, label: str, tools: list[Data]) -> list[Data]:
        """The model is told of tools of a tool server."""
        item = {"id": new_id(PREFIXES["mcp_list_tools"]), "type": "mcp_list_tools", "server_label": label}
        place = {"output_index": len(self.response["output"])}
        added = self._event("response.output_item.added", {**place, "item": {**item, "tools": [], "error": None}})
        whole = {**item, "tools": tools, "error": None}
        named = {**place, "item_id": item["id"]}
        events = [self._event(f"response.mcp_list_tools.{kind}", named) for kind in ("in_progress", "completed")]
        self.response["output"].append(whole)
        return [added, *events, self._event("response.output_item.done", {**place, "item": whole})]

    def pause(self) -> list[Data]:
        """The model has said what it says in this round."""
        events = self._close("completed")
        self._round = new_round()
        return events

    def approved(self, request: Data) -> list[Data]:
        """The call that an approval request asks for is made now.

        Args:
            request: the request's item.
        """
        item = self._mcp_call(request["server_label"], request["name"]) | {"approval_request_id": request["id"]}
        events = self._begin(item)
        self._open = _Open(item, pieces=[request["arguments"]])
        return [*events, *self._close("completed")]

    def pending(self) -> list[tuple[int, Data]]:
        """Calls that have been written and not made: their places in the output, and the items."""
        return [(place, self.response["output"][place]) for place in self._pending]

    def called(self, place: int, result: CallResult) -> list[Data]:
        """A call has been made.

        Args:
            place: where its item stands in the output.
        """
        status = "completed" if result.error is None else "failed"
        return self._called(place, status, {"output": result.output, "error": result.error})

    def results(self) -> dict[str, str]:
        """What the model is told of calls that had been approved, by the ids of the requests for it."""
        calls = [item for item in self.response["output"] if item.get("approval_request_id") is not None]
        return {item["approval_request_id"]: told_of(item) for item in calls}

    def _called(self, place: int, status: str, fields: Data) -> list[Data]:
        self._pending.remove(place)
        item = {**self.response["output"][place], "status": status, **fields}
        self.response["output"][place] = item
        events = []
        if status != "incomplete":
            events.append(self._event(f"response.mcp_call.{status}", {"output_index": place, "item_id": item["id"]}))
        return [*events, self._event("response.output_item.done", {"output_index": place, "item": item})]

    def _abandoned(self) -> list[Data]:
        """Calls that are never made."""
        return [event for place in [*self._pending] for event in self._called(place, "incomplete", {})]

    def finish(self, reason: str | None, usage: Data, *, why: str | None = None) -> list[Data]:
        """The response has ended.

        Args:
            reason: the engine's finish reason.
            usage: the tokens of all rounds.
            why: what has ended it at "length", where that is not the model's output.
        """
        cut = reason == "length"
        events = [*self._close("incomplete" if cut else "completed"), *self._abandoned()]
        if not self.response["output"]:  # it said nothing: that is a message too
            events += [*self._begin(self._message()), *self._close("incomplete" if cut else "completed")]
        self.response |= {"status": "incomplete" if cut else "completed", "usage": usage}
        if cut:
            # Clients' types know this reason alone for what is too long.
            message = {} if why is None else {"message": why}
            self.response["incomplete_details"] = {"reason": "max_output_tokens", **message}
        else:
            self.response["completed_at"] = int(time.time())
        return [*events, self._lifecycle("incomplete" if cut else "completed")]

    def fail(self, error: ApiError) -> list[Data]:
        """The response has ended before its time."""
        if error.status < 500:
            code = "invalid_prompt"
        else:
            code = "rate_limit_exceeded" if error.code == "queue_full" else "server_error"
        events = [*([] if self._next else self.begin()), *self._close("incomplete"), *self._abandoned()]
        self.response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return [*events, self._lifecycle("failed")]

    def cancel(self) -> None:
        """Nobody wants it any more, so nobody is told."""
        self._close("incomplete")
        self._abandoned()
        self.response["status"] = "cancelled"

    def snapshot(self) -> Data:
        """The response as it is now."""
        return {**self.response, "output": [*self.response["output"], *self._so_far()]}

    def _so_far(self) -> list[Data]:
        """The item that is being written, if clients know of it."""
        return [] if self._open is None or self._open.item["type"] == REQUEST else [self._closed()]

    def _input(self, text: str) -> list[Data]:
        """More of the input of a call to a custom tool."""
        return [self._piece("custom_tool_call_input.delta", text, {"delta": text})] if text else []

    def _event(self, kind: str, fields: Data) -> Data:
        event = {"type": kind, "sequence_number": self._next, **fields}
        self._next += 1
        return event

    def _lifecycle(self, kind: str) -> Data:
        return self._event(f"response.{kind}", {"response": {**self.response, "output": [*self.response["output"]]}})

    def _of_item(self, kind: str, fields: Data) -> Data:
        assert self._open is not None
        place = {"output_index": len(self.response["output"]), "item_id": self._open.item["id"]}
        return self._event(f"response.{kind}", {**place, **fields})

    def _piece(self, kind: str, text: str, fields: Data) -> Data:
        assert self._open is not None
        self._open.pieces.append(text)
        return self._of_item(kind, fields)

    def _opened(self, kind: str, new: Callable[[], Data]) -> list[Data]:
        if self._open is not None and self._open.item["type"] == kind:
            return []
        return [*self._close("completed"), *self._begin(new())]

    def _message(self) -> Data:
        return {"id": new_id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": []}

    def _reasoning(self) -> Data:
        return {"id": new_id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}

    def _call(self, name: str, id: str | None) -> Data:
        if name in self._mcp:
            label, tool = self._mcp[name]
            if name in self._asking:
                id = id_in_round(PREFIXES[REQUEST], self._round)
                return {"id": id, "type": REQUEST, "server_label": label, "name": tool}
            return self._mcp_call(label, tool)
        kind = "custom_tool_call" if name in self._custom else "function_call"
        item = {"id": id_in_round(PREFIXES[kind], self._round), "type": kind, "status": "in_progress"}
        if name in self._namespaces:
            namespace, name = self._namespaces[name]
            item["namespace"] = namespace
        return {**item, "call_id": id, "name": name, WRITTEN[kind]: ""}

    def _mcp_call(self, label: str, name: str) -> Data:
        id = id_in_round(PREFIXES["mcp_call"], self._round)
        item = {"id": id, "type": "mcp_call", "status": "in_progress", "server_label": label, "name": name}
        return {**item, "arguments": "", "approval_request_id": None, "error": None, "output": None}

    def _begin(self, item: Data) -> list[Data]:
        self._open = _Open(item, InputReader() if item["type"] == "custom_tool_call" else None)
        if item["type"] == REQUEST:
            return []
        place = {"output_index": len(self.response["output"]), "item": item}
        events = [self._event("response.output_item.added", place)]
        if (part := _part(item, "", [])) is not None:
            events.append(self._of_item("content_part.added", {"content_index": 0, "part": part}))
        elif item["type"] == "mcp_call":
            events.append(self._of_item("mcp_call.in_progress", {}))
        return events

    def _closed(self, status: str = "in_progress") -> Data:
        """The item that is being written, with all that it has by now."""
        assert self._open is not None
        item, text = self._open.item, "".join(self._open.pieces)
        if (part := _part(item, text, self._open.logprobs)) is None:
            return {**item, "status": status, WRITTEN[item["type"]]: text}
        sealing = {"encrypted_content": sealed(text)} if self._seal and item["type"] == "reasoning" else {}
        return {**item, "status": status, "content": [part], **sealing}

    def _close(self, status: str) -> list[Data]:
        if self._open is None:
            return []
        events = [] if self._open.input is None else self._input(self._open.input.finish())
        item, text = self._closed(status), "".join(self._open.pieces)
        if item["type"] == REQUEST:
            return self._ask({**self._open.item, "arguments": text}, whole=status == "completed")
        match item["type"]:
            case "message":
                more = {"content_index": 0, "text": text, "logprobs": self._open.logprobs}
                events.append(self._of_item("output_text.done", more))
            case "reasoning":
                events.append(self._of_item("reasoning_text.done", {"content_index": 0, "text": text}))
            case "custom_tool_call":
                events.append(self._of_item("custom_tool_call_input.done", {"input": text}))
            case "mcp_call":
                events.append(self._of_item("mcp_call_arguments.done", {"arguments": text}))
                if status == "completed":  # written, and yet to be made
                    self._pending.append(len(self.response["output"]))
                    self.response["output"].append({**item, "status": "in_progress"})
                    self._open = None
                    return events
            case _:
                more = {"name": item["name"], "arguments": text}
                events.append(self._of_item("function_call_arguments.done", more))
        if "content" in item:
            events.append(self._of_item("content_part.done", {"content_index": 0, "part": item["content"][0]}))
        place = {"output_index": len(self.response["output"]), "item": item}
        events.append(self._event("response.output_item.done", place))
        self.response["output"].append(item)
        self._open = None
        return events

    def _ask(self, request: Data, *, whole: bool) -> list[Data]:
        """The client is asked to approve a call; of one that was cut nobody hears."""
        self._open = None
        if not whole:
            return []
        place = {"output_index": len(self.response["output"]), "item": request}
        self.response["output"].append(request)
        return [self._event(f"response.output_item.{kind}", place) for kind in ("added", "done")]


def _part(item: Data, text: str, logprobs: list[Data]) -> Data | None:
    """The one part of an item's content; None: it has none."""
    match item["type"]:
        case "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        case "reasoning":
            return {"type": "reasoning_text", "text": text}
        case _:
            return None
