"""A response on its way: rounds of the model and calls of tools, as the events that tell of them and as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson

from llmjax.outputs import CompletionOutput
from llmjax.parsing.events import Content
from llmjax.serve.context import Server
from llmjax.serve.generation import JobOutput, Tally, usage_of
from llmjax.serve.logprobs import TokenNames, chat_logprobs
from llmjax.serve.mcp.loop import AtBound, ToolLoop
from llmjax.serve.protocol.responses import ResponsesRequest
from llmjax.serve.responses.approvals import REQUEST
from llmjax.serve.responses.store import StoredResponse
from llmjax.serve.responses.writer import ResponseWriter
from llmjax.serve.sse import named_event, obfuscated
from llmjax.serve.turn import Said, Turn

OF_CLIENTS = frozenset({"function_call", "custom_tool_call", REQUEST})  # what the client has to answer first


@dataclass
class _End:
    """How the last round has ended.

    Args:
        tallies: tokens of all rounds.
        reason: the engine's finish reason; None: the round has not ended.
        why: the bound that the loop has come to.
    """

    tallies: Sequence[Tally] = ()
    reason: str | None = None
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class Writing:
    """A response on its way.

    Args:
        owner: the API key that it will belong to, if it is stored.
        input: its items as JSON, to be stored.
        num_items: how many.
        waiting: log-probabilities of tokens that have not said anything yet.
        loop: runs calls of tool servers; None: there are none.
    """

    server: Server
    body: ResponsesRequest
    turn: Turn
    writer: ResponseWriter
    owner: str
    input: bytes
    num_items: int
    loop: ToolLoop | None = None
    waiting: list[dict[str, Any]] = field(default_factory=list)

    async def whole(self) -> bytes:
        """OpenAI's ``Response`` as JSON."""
        if self.body.wants_logprobs or self.loop is not None:
            async for _ in self.events():
                pass
        else:
            said = await self.turn.all_said()
            self._write(said)
            self.writer.finish(said.finish_reason, self._usage(self.turn.tally.all))
        answer = orjson.dumps(self.writer.response)
        self._keep(answer)
        return answer

    def sent(self, event: dict[str, Any]) -> bytes:
        """An event for a stream. What can be retrieved is stored before the last of them."""
        if event["type"] in ("response.completed", "response.incomplete"):
            self._keep(orjson.dumps(self.writer.response))
        hidden = self.body.obfuscates and "delta" in event
        return named_event(obfuscated(event, "delta") if hidden else event)

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """OpenAI's ``ResponseStreamEvent``s."""
        ended = _End()
        try:
            async with aclosing(self._rounds(ended)) as rounds:
                async for event in rounds:
                    yield event
        except AtBound as bound:
            ended.reason, ended.why = "length", str(bound)
        if ended.reason is not None:
            for event in self.writer.finish(ended.reason, self._usage(ended.tallies), why=ended.why):
                yield event

    async def _rounds(self, ended: _End) -> AsyncGenerator[dict[str, Any], None]:
        """The events of all rounds; ``ended`` gets what tells how the last one has ended.

        Raises:
            AtBound: the loop has come to a bound.
        """
        turn: Turn | None = self.turn
        begun, loop = False, self.loop
        if loop is not None and loop.approved:
            begun = True
            for event in self._begin():
                yield event
            for request in loop.approved:
                for event in self.writer.approved(request):
                    yield event
            async with aclosing(self._calls(loop)) as made:
                async for event in made:
                    yield event
            self.writer.pause()
            turn = await loop.resume(self.writer.results())
        while turn is not None:
            reader, place, ended.tallies = turn.form.reader(), len(self.writer.response["output"]), turn.tally.all
            async with aclosing(turn.outputs()) as parts:
                async for part in _until(parts, loop):
                    said = turn.said(part, reader)
                    ended.reason = said.finish_reason
                    if not begun:
                        begun = True
                        for event in self._begin():
                            yield event
                        place = len(self.writer.response["output"])
                    for event in self._write(said):
                        yield event
            if loop is None or ended.reason == "length":
                return
            for event in self.writer.pause():
                yield event
            pending = bool(self.writer.pending())
            async with aclosing(self._calls(loop)) as made:
                async for event in made:
                    yield event
            said_items = self.writer.response["output"][place:]
            goes_on = pending and not any(item["type"] in OF_CLIENTS for item in said_items)
            turn = await loop.next(turn, said_items) if goes_on else None

    async def _calls(self, loop: ToolLoop) -> AsyncGenerator[dict[str, Any], None]:
        """Makes the calls that have been written."""
        for at, call in self.writer.pending():
            for event in self.writer.called(at, await loop.call(call)):
                yield event

    def _begin(self) -> list[dict[str, Any]]:
        events = self.writer.begin()
        if self.loop is not None:
            for label, tools in self.loop.unlisted().items():
                events += self.writer.list_tools(label, tools)
        return events

    def _write(self, said: Said) -> list[dict[str, Any]]:
        self.waiting.extend(self._logprobs(said.choice))
        events: list[dict[str, Any]] = []
        for event in said.events:
            events += self.writer.write(event, self.waiting.copy() if isinstance(event, Content) else [])
            self.waiting.clear()
        return events

    def _logprobs(self, choice: CompletionOutput) -> list[dict[str, Any]]:
        if choice.logprobs is None:
            return []
        names = TokenNames(self.server.engine.tokenizer, as_ids=False)
        top = self.body.top_logprobs or 0
        named = self.body.logprob_token_ids
        logprobs = chat_logprobs(choice.token_ids, choice.logprobs, names=names, top=top, named=named)
        entries: list[dict[str, Any]] = logprobs["content"]
        ended_by_token = choice.finish_reason == "stop" and not isinstance(choice.stop_reason, str)
        return entries[:-1] if ended_by_token and not self.body.include_stop_str_in_output else entries

    def _usage(self, tallies: Sequence[Tally]) -> dict[str, Any]:
        usage = usage_of(tallies)
        reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage["total_tokens"],
        }

    def stored(self, answer: bytes | None) -> StoredResponse:
        return StoredResponse(
            id=self.turn.job.id, owner=self.owner, input=self.input, num_items=self.num_items, answer=answer
        )

    def _keep(self, answer: bytes) -> None:
        if self.body.stored:
            self.server.responses.put(self.stored(answer))


async def _until(parts: AsyncGenerator[JobOutput, None], loop: ToolLoop | None) -> AsyncGenerator[JobOutput, None]:
    """Outputs, for as long as the loop's time lasts.

    Raises:
        AtBound: it is over.
    """
    while True:
        bound = asyncio.timeout_at(None if loop is None else loop.deadline)
        try:
            async with bound:
                part = await anext(parts)
        except StopAsyncIteration:
            return
        except TimeoutError:
            if loop is None or not bound.expired():
                raise
            raise AtBound(loop.out_of_time) from None
        yield part
