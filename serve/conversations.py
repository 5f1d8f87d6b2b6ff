"""Conversations whose messages the server keeps, so that clients send the new ones only (``--record-conversation``)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from llmjax.serve.custom_tools import WRITTEN, whole_call
from llmjax.serve.errors import ApiError, cut
from llmjax.serve.owned import OwnedStore
from llmjax.serve.protocol.chat import MAX_MESSAGES, ChatMessage, ChatRequest

FIELD = "conversation_id"


@dataclass(kw_only=True)
class Conversation:
    """What has been said.

    Attributes:
        owner: the API key that it belongs to; see `owner_of`.
        messages: each as JSON.
        size: bytes of them.
        running: the next message is being written.
        expires: on the clock of the store.
    """

    id: str
    owner: str
    created: int = field(default_factory=lambda: int(time.time()))
    messages: list[bytes] = field(default_factory=list)
    size: int = 0
    running: bool = False
    expires: float = 0.0

    def history(self) -> list[ChatMessage]:
        """The messages as a request has them."""
        return [ChatMessage.model_validate_json(message) for message in self.messages]


class ConversationTurn:
    """A request that goes on with a conversation, until it has been answered. Only then its messages are part of it."""

    def __init__(self, store: Conversations, conversation: Conversation, own: list[ChatMessage]) -> None:
        self._store = store
        self._conversation = conversation
        self._own = own
        self.before = len(conversation.messages)

    def history(self) -> list[ChatMessage]:
        """What has been said before, then the request's own messages."""
        return [*self._conversation.history(), *self._own]

    @property
    def size(self) -> int:
        """Bytes of what has been said before."""
        return self._conversation.size

    @property
    def said(self) -> dict[str, Any]:
        """What the answer says of it: its id, and how many messages were known."""
        return {"conversation": {"id": self._conversation.id, "messages": self.before}}

    def record(self, answer: dict[str, Any]) -> None:
        """Adds the request's messages and the answer's.

        Args:
            answer: the message, whatever the server calls its role.
        """
        answer = {name: value for name, value in answer.items() if value is not None} | {"role": "assistant"}
        lines = [message.model_dump_json(exclude_none=True).encode() for message in self._own]
        self._store.add(self._conversation, [*lines, orjson.dumps(answer)])

    def end(self) -> None:
        """The request has been answered, or never will be."""
        self._conversation.running = False
        self._store.settle(self._conversation)


class Conversations(OwnedStore[Conversation]):
    """Keeps conversations; the other arguments are those of `OwnedStore`.

    Args:
        most_request_bytes: largest size of a conversation: what one request that held all of it might have.
    """

    def __init__(
        self,
        *,
        most: int,
        most_bytes: int,
        most_request_bytes: int,
        lifetime: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("conversation", most=most, most_bytes=most_bytes, lifetime=lifetime, clock=clock)
        self._most_request_bytes = most_request_bytes

    def begin(self, owner: str, body: ChatRequest) -> ConversationTurn | None:
        """Whether, and how, a request goes on with a conversation; a new one begins where there is none of its id. The
        turn has to be ended.

        Raises:
            ApiError: nothing is kept here, the last request is not answered yet, the conversation is too long, or the
                request is one that nothing can follow.
        """
        if body.record_conversation is False or (body.conversation_id is None and not body.record_conversation):
            return None
        name = FIELD if body.conversation_id is not None else "record_conversation"
        if not self._most:
            raise ApiError(
                f"`{name}`: this server keeps no conversations (--record-conversation); send all messages",
                param=name,
                code="unsupported_parameter",
            )
        clashes = {
            "n": body.choices > 1,
            "continue_final_message": body.continue_final_message,
            "echo": bool(body.echo),
        }
        if clash := next((one for one, given in clashes.items() if given), None):
            raise ApiError(
                f"`{clash}` cannot be combined with `{name}`: a conversation keeps one whole answer",
                param=clash,
                code="invalid_value",
            )
        id = body.conversation_id or f"conv_{uuid.uuid4().hex}"
        conversation = self.find(owner, id) or Conversation(id=id, owner=owner)
        if conversation.running:
            message = f"the conversation {cut(id)!r} is being continued by another request"
            raise ApiError(message, status=409, param=name, code="conflict")
        if (
            len(conversation.messages) + len(body.messages) > MAX_MESSAGES
            or conversation.size > self._most_request_bytes
        ):
            message = f"the conversation {cut(id)!r} has become too long; begin another"
            raise ApiError(message, param=name, code="invalid_value")
        conversation.running = True
        self.put(conversation)
        return ConversationTurn(self, conversation, body.messages)

    def add(self, conversation: Conversation, messages: list[bytes]) -> None:
        """Adds messages, unless the conversation has been forgotten meanwhile."""
        if self.find(conversation.owner, conversation.id) is conversation:
            conversation.messages += messages
            conversation.size += sum(map(len, messages))
            self.put(conversation)

    def settle(self, conversation: Conversation) -> None:
        """What was kept for the sake of a turn may go; nothing is kept of a conversation in which nothing was said."""
        if not conversation.messages and self.find(conversation.owner, conversation.id) is conversation:
            self.delete(conversation.owner, conversation.id)
        self.trim(conversation.owner)


class Joined:
    """The message that the deltas of a stream make."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []

    def add(self, delta: Mapping[str, Any]) -> None:
        """The next delta, as `AnswerReader` makes them."""
        for name, value in delta.items():
            if name != "tool_calls":
                self._texts.setdefault(name, []).append(value)
                continue
            for call in value:
                if "id" in call:
                    self._calls.append(call)
                    self._arguments.append([])
                kind = "custom" if "custom" in call else "function"
                self._arguments[call["index"]].append(call[kind][WRITTEN[kind]])

    def message(self) -> dict[str, Any]:
        """All of them as one."""
        fields: dict[str, Any] = {name: "".join(parts) for name, parts in self._texts.items()}
        if self._calls:
            fields["tool_calls"] = [
                whole_call(call["type"], id=call["id"], name=call[call["type"]]["name"], written="".join(arguments))
                for call, arguments in zip(self._calls, self._arguments, strict=True)
            ]
        return {"content": "", **fields}


class UntilAnswered:
    """A response that ends its turn however it ends itself."""

    def __init__(self, response: ASGIApp, turn: ConversationTurn) -> None:
        self._response = response
        self._turn = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._response(scope, receive, send)
        finally:
            self._turn.end()
