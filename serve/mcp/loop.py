"""Rounds of one response: the model calls tools of tool servers, hears what they say, and goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from llmjax.serve.mcp.offered import Offered
from llmjax.serve.mcp.results import INVALID_PARAMS, CallResult, refused
from llmjax.serve.protocol.chat import ChatRequest
from llmjax.serve.responses.conversation import Item, flat_name, messages_of
from llmjax.serve.turn import Turn

Prepare = Callable[[ChatRequest, Turn], Awaitable[Turn]]


@dataclass(kw_only=True)
class ToolLoop:
    """What a response needs to run tools and go on.

    Args:
        offered: tools by what the model calls them.
        known: labels of servers whose tools an item of the conversation lists already.
        chat: the request of the round that runs.
        prepare: makes a turn of a request that follows on a turn.
        most: calls that the response may make.
        made: calls that it has made.
    """

    offered: Mapping[str, Offered]
    known: frozenset[str]
    chat: ChatRequest
    prepare: Prepare
    most: int
    made: int = 0

    def unlisted(self) -> dict[str, list[dict[str, Any]]]:
        """Tools by the label of their server, where the conversation does not list them yet."""
        lists: dict[str, list[dict[str, Any]]] = {}
        for one in self.offered.values():
            if one.label not in self.known:
                lists.setdefault(one.label, []).append(one.listed())
        return lists

    async def call(self, item: Item) -> CallResult:
        """Makes the call of an ``mcp_call`` item; whatever goes wrong is in the result."""
        if self.made >= self.most:
            return refused(INVALID_PARAMS, f"a response may make {self.most} calls (max_tool_calls, --mcp-max-calls)")
        self.made += 1
        try:
            arguments = orjson.loads(item["arguments"] or "{}")
        except orjson.JSONDecodeError:
            arguments = None
        if not isinstance(arguments, dict):
            return refused(INVALID_PARAMS, "the arguments are not a JSON object")
        one = self.offered[flat_name(item["server_label"], item["name"])]
        return await one.server.call(one.tool.name, arguments)

    async def next(self, turn: Turn, said: Sequence[Item]) -> Turn | None:
        """The next round; None: no tokens are left for one.

        Args:
            turn: the round before it.
            said: items of that round, with the results of their calls.

        Raises:
            ApiError: the conversation no longer fits, like `prepare`.
        """
        changes: dict[str, Any] = {"messages": [*self.chat.messages, *messages_of(None, [], said, [])]}
        if self.chat.tool_choice != "none":
            changes["tool_choice"] = "auto"  # what was demanded has been called
        if self.made >= self.most:
            tools = self.chat.tools or []
            changes["tools"] = [tool for tool in tools if tool["function"]["name"] not in self.offered]
        if (most := self.chat.max_completion_tokens) is not None:
            changes["max_completion_tokens"] = most - turn.round_tokens
            if changes["max_completion_tokens"] <= 0:
                return None
        self.chat = self.chat.model_copy(update=changes)
        return await self.prepare(self.chat, turn)
