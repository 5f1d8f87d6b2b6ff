"""Rounds of one response: the model calls tools of tool servers, hears what they say, and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from llmjax.errors import LLMJaxError
from llmjax.serve.errors import ApiError, as_api_error
from llmjax.serve.mcp.offered import Offered
from llmjax.serve.mcp.results import INVALID_PARAMS, CallResult, refused
from llmjax.serve.protocol.chat import ChatMessage, ChatRequest
from llmjax.serve.responses.conversation import Item, flat_name, messages_of
from llmjax.serve.turn import Turn

Prepare = Callable[[ChatRequest, Turn | None], Awaitable[Turn]]


class AtBound(Exception):
    """The loop has come to a bound: there is no next round, and what has been done holds. Its text says which bound."""


@dataclass(kw_only=True)
class ToolLoop:
    """What a response needs to run tools and go on.

    Args:
        offered: tools by what the model calls them.
        known: labels of servers whose tools an item of the conversation lists already.
        chat: the request of the round that runs.
        prepare: makes a turn of a request that follows on a turn, or is the first.
        most: calls that the response may make.
        seconds: how long it may go on after its first call began.
        approved: approval requests whose calls are made before the model goes on.
        made: calls that it has made.
        deadline: when the time is over, on the event loop's clock; None: nothing has been called.
    """

    offered: Mapping[str, Offered]
    known: frozenset[str]
    chat: ChatRequest
    prepare: Prepare
    most: int
    seconds: float
    approved: Sequence[Item] = ()
    made: int = 0
    deadline: float | None = None

    def unlisted(self) -> dict[str, list[dict[str, Any]]]:
        """Tools by the label of their server, where the conversation does not list them yet."""
        lists: dict[str, list[dict[str, Any]]] = {}
        for one in self.offered.values():
            if one.label not in self.known:
                lists.setdefault(one.label, []).append(one.tool.listed())
        return lists

    async def call(self, item: Item) -> CallResult:
        """Makes the call of an ``mcp_call`` item; whatever goes wrong is in the result."""
        if self.made >= self.most:
            return refused(INVALID_PARAMS, f"a response may make {self.most} calls (max_tool_calls, --mcp-max-calls)")
        self.made += 1
        if self.deadline is None:
            self.deadline = asyncio.get_running_loop().time() + self.seconds
        try:
            arguments = orjson.loads(item["arguments"] or "{}")
        except orjson.JSONDecodeError:
            arguments = None
        if not isinstance(arguments, dict):
            return refused(INVALID_PARAMS, "the arguments are not a JSON object")
        one = self.offered[flat_name(item["server_label"], item["name"])]
        return await one.server.call(one.tool.name, arguments, deadline=self.deadline)

    async def resume(self, results: Mapping[str, str]) -> Turn:
        """The first round of a response that begins with calls that have been approved.

        Args:
            results: what they have brought, by the ids of the approval requests.

        Raises:
            AtBound: like `next`.
            ApiError: likewise.
        """
        messages = [
            message if (told := results.get(message.tool_call_id or "")) is None else _with(message, told)
            for message in self.chat.messages
        ]
        return await self._round({"messages": messages}, None)

    async def next(self, turn: Turn, said: Sequence[Item]) -> Turn:
        """The next round.

        Args:
            turn: the round before it.
            said: items of that round, with the results of their calls.

        Raises:
            AtBound: the conversation no longer fits, or no tokens or no time are left.
            ApiError: something else is wrong, like `prepare`.
        """
        changes: dict[str, Any] = {"messages": [*self.chat.messages, *messages_of(None, [], said, [])]}
        if self.chat.tool_choice != "none":
            changes["tool_choice"] = "auto"  # what was demanded has been called
        if (most := self.chat.max_completion_tokens) is not None:
            changes["max_completion_tokens"] = most - turn.round_tokens
            if changes["max_completion_tokens"] <= 0:
                raise AtBound("max_output_tokens have been written")
        return await self._round(changes, turn)

    async def _round(self, changes: dict[str, Any], after: Turn | None) -> Turn:
        if self.deadline is not None and asyncio.get_running_loop().time() >= self.deadline:
            raise AtBound(self.out_of_time)
        if self.made >= self.most:
            tools = self.chat.tools or []
            changes["tools"] = [tool for tool in tools if tool["function"]["name"] not in self.offered]
            if self.chat.tool_choice != "none":
                changes["tool_choice"] = "auto"
        self.chat = self.chat.model_copy(update=changes)
        try:
            return await self.prepare(self.chat, after)
        except (ApiError, LLMJaxError) as error:
            if (told := as_api_error(error)).code != "context_length_exceeded":
                raise
            raise AtBound(f"no further round fits the context: {told.message}") from error

    @property
    def out_of_time(self) -> str:
        return f"calls and what followed on them took longer than {self.seconds:g} s (--mcp-loop-timeout)"


def _with(message: ChatMessage, content: str) -> ChatMessage:
    return message.model_copy(update={"content": content})
