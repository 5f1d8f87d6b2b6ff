"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from llmjax.characters import whole_characters
from llmjax.outputs import CompletionOutput, RequestOutput
from llmjax.serve.answers import AnswerReader
from llmjax.serve.body import parse, read_json
from llmjax.serve.context import Server, cache_salt_of, client_of, ignored_fields, owner_of, record_of, server_of
from llmjax.serve.conversations import ConversationTurn, Joined, UntilAnswered
from llmjax.serve.custom_tools import NO_TOOLS, CustomTools, chosen, from_chat
from llmjax.serve.generation import guarded, request_metrics
from llmjax.serve.legacy_functions import NAMES_OF_FUNCTIONS, read_functions, with_function_call
from llmjax.serve.logprobs import TokenNames, chat_logprobs, num_logprobs, prompt_logprobs
from llmjax.serve.other_names import other_names
from llmjax.serve.prompts import CHARS_PER_PART, off_loop
from llmjax.serve.protocol.chat import ChatRequest, num_parts
from llmjax.serve.sse import EventStream, delta_event, event
from llmjax.serve.transfer import transfer_answer
from llmjax.serve.turn import Turn, prepare


async def chat_completions(request: Request) -> Response | ASGIApp:
    """An answer to a conversation, whole or as a stream."""
    server = server_of(request)
    body = parse(await read_json(request), ChatRequest, ignored=ignored_fields(request))
    custom = read_custom_tools(body)
    conversation = server.conversations.begin(owner_of(request), body)
    if conversation is None:
        return await _respond(request, server, body, custom)
    try:
        messages = CHARS_PER_PART * num_parts(body.messages)
        body.messages = await off_loop(conversation.history, size=conversation.size + messages)
        response = await _respond(request, server, body, custom, conversation)
    except BaseException:
        conversation.end()
        raise
    return UntilAnswered(response, conversation)


def read_custom_tools(body: ChatRequest) -> CustomTools:
    """Which of a request's tools are custom ones; all of them, and its functions, are functions of ``tools`` then.

    Raises:
        ApiError: a tool is wrong, or there are both.
    """
    read_functions(body)
    if not body.tools:
        return NO_TOOLS
    functions, custom = from_chat(body.tools)
    body.tools, body.tool_choice = chosen(functions, body.tool_choice)
    return custom


async def turn_of(request: Request, server: Server, body: ChatRequest, custom: CustomTools) -> Turn:
    """What a chat asks of the engine; raises the errors of `prepare`."""
    with other_names({**body.llama_names, **({} if body.functions is None else NAMES_OF_FUNCTIONS)}):
        return await prepare(
            server,
            body,
            record=record_of(request),
            cache_salt=cache_salt_of(request, body.cache_salt),
            client=client_of(request),
            id=f"chatcmpl-{body.request_id or record_of(request).id}",
            custom=custom,
        )


async def _respond(
    request: Request,
    server: Server,
    body: ChatRequest,
    custom: CustomTools,
    conversation: ConversationTurn | None = None,
) -> Response | ASGIApp:
    config = server.config
    turn = await turn_of(request, server, body, custom)
    answer = ChatAnswer(server=server, body=body, turn=turn, created=int(time.time()), conversation=conversation)
    if body.stream:
        return EventStream(answer.events(), keep_alive=config.sse_keep_alive_interval, timeout=config.request_timeout)
    whole = await guarded(request.receive, answer.whole(), timeout=config.request_timeout)
    return Response(whole, media_type="application/json")


@dataclass(frozen=True, kw_only=True)
class ChatAnswer:
    """Turns the engine's outputs into the response, whole or in chunks."""

    server: Server
    body: ChatRequest
    turn: Turn
    created: int
    conversation: ConversationTurn | None = None

    @property
    def names(self) -> TokenNames:
        return TokenNames(self.server.engine.tokenizer, as_ids=bool(self.body.return_tokens_as_token_ids))

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A response, or a chunk of one, but for its usage."""
        return {
            "id": self.turn.job.id,
            "object": kind,
            "created": self.created,
            "model": self.turn.job.model,
            "system_fingerprint": self.server.fingerprint,
            "choices": choices,
            **self.body.tier,
            **({} if self.conversation is None else self.conversation.said),
        }

    def _logprobs(self, choice: CompletionOutput) -> dict[str, Any] | None:
        if not self.body.logprobs or choice.logprobs is None:
            return None
        top, named = self.body.top_logprobs or 0, self.body.logprob_token_ids
        return chat_logprobs(choice.token_ids, choice.logprobs, names=self.names, top=top, named=named)

    async def whole(self) -> bytes:
        """OpenAI's ``ChatCompletion`` as JSON."""
        with other_names(self.body.llama_names):  # forms are read where the answer begins
            output = await self.turn.whole()
        written = num_logprobs(output.prompt_logprobs, *(choice.logprobs for choice in output.outputs))
        read = 0 if self.turn.form.grammar is None else sum(len(choice.text) for choice in output.outputs)
        answer, body = await off_loop(lambda: self._written(output), size=4 * written + read)
        if self.conversation is not None:
            self.conversation.record(answer["choices"][0]["message"])
        return body

    def _written(self, output: RequestOutput) -> tuple[dict[str, Any], bytes]:
        answer = self._answer(output)
        return answer, orjson.dumps(answer)

    def _answer(self, output: RequestOutput) -> dict[str, Any]:
        choices = [self.choice(choice) for choice in sorted(output.outputs, key=lambda choice: choice.index)]
        answer = {**self.envelope("chat.completion", choices), "usage": self.turn.tally.usage()}
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, names=self.names)
        answer |= self.prompt()
        if self.server.config.enable_per_request_metrics:
            answer["metrics"] = self._metrics(output)
        return answer | transfer_answer(self.server.engine, self.turn.job)

    def _metrics(self, output: RequestOutput) -> dict[str, float | None] | None:
        if self.body.continuations > 1:
            return None  # times of several answers
        return request_metrics(output.metrics, tokens=self.turn.tally.completion_tokens)

    def prompt(self) -> dict[str, Any]:
        """What a request wants to know of its own prompt."""
        (prompt,) = self.turn.job.prompts
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = prompt.token_ids
        if self.body.return_prompt_text:
            fields["prompt_text"] = whole_characters(prompt.text or "")
        return fields

    def choice(self, choice: CompletionOutput) -> dict[str, Any]:
        """A continuation as the response has it; its reasoning is counted."""
        reader = self.turn.form.reader()
        fields = self._as_asked(reader.message(choice))
        if echoed := self.body.echoed:
            fields["content"] = echoed + (fields.get("content") or "")
        self.turn.count_reasoning(reader.reasoning_tokens)
        entry = {
            "index": choice.index,
            "message": {"role": self.server.config.response_role, **fields, "refusal": None},
            "logprobs": self._logprobs(choice),
            "finish_reason": self._reason(reader.finish_reason(choice)),
            "stop_reason": choice.stop_reason,
        }
        return {**entry, "token_ids": choice.token_ids} if self.body.return_token_ids else entry

    def _as_asked(self, fields: dict[str, Any]) -> dict[str, Any]:
        """With a call of a function, where the request has functions and not tools."""
        return with_function_call(fields) if self.body.functions else fields

    def _reason(self, reason: str | None) -> str | None:
        return "function_call" if reason == "tool_calls" and self.body.functions else reason

    async def events(self) -> AsyncGenerator[bytes, None]:
        """OpenAI's ``ChatCompletionChunk``s: a role per choice, deltas, a finish per choice, then the usage."""
        first, last = True, None
        readers = [self.turn.form.reader() for _ in range(self.body.choices)]
        joined_text = Joined()
        with other_names(self.body.llama_names):
            async with aclosing(self.turn.outputs()) as parts:
                async for part in parts:
                    if first:
                        first = False
                        for index in range(self.body.choices):
                            yield self._opening(index)
                            if echoed := self.body.echoed:
                                yield self._event(self._chunk(index, {"content": echoed}))
                    last = part.output
                    for choice in last.outputs:
                        self.turn.tally.add_tokens(choice)
                        for chunk in self._deltas(choice, readers[choice.index], joined_text):
                            yield chunk
        if self.conversation is not None:
            self.conversation.record(joined_text.message())
        if self.body.include_usage:
            end = {**self.envelope("chat.completion.chunk", []), "usage": self.turn.tally.usage()}
            if self.server.config.enable_per_request_metrics and last is not None:
                end["metrics"] = self._metrics(last)
            yield event(end)

    def _chunk(self, index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        chunk = self.envelope("chat.completion.chunk", [choice])
        if self.body.include_usage:
            chunk["usage"] = self.turn.tally.usage() if self.body.continuous_usage else None
        return chunk

    def _event(self, chunk: dict[str, Any]) -> bytes:
        return delta_event(chunk, obfuscate=self.body.obfuscates)

    def _opening(self, index: int) -> bytes:
        chunk = self._chunk(index, {"role": self.server.config.response_role, "content": "", "refusal": None})
        return self._event({**chunk, **self.prompt()})

    def _deltas(self, choice: CompletionOutput, reader: AnswerReader, said: Joined) -> list[bytes]:
        chunks = []
        counted = reader.reasoning_tokens
        deltas = reader.deltas(choice)
        self.turn.count_reasoning(reader.reasoning_tokens - counted)
        extra: dict[str, Any] = {}
        if self.body.logprobs and choice.logprobs:
            extra["logprobs"] = self._logprobs(choice)
        if self.body.return_token_ids and choice.token_ids:
            extra["token_ids"] = choice.token_ids
        if extra and not deltas:
            deltas = [{"content": ""}]
        for delta in deltas:
            if self.conversation is not None:
                said.add(delta)
            chunks.append(self._event(self._chunk(choice.index, self._as_asked(delta), **extra)))
            extra = {}  # tokens come with the first of what they say
        if choice.finish_reason is not None:
            reason = self._reason(reader.finish_reason(choice))
            end = {"finish_reason": reason, "stop_reason": choice.stop_reason}
            chunks.append(self._event(self._chunk(choice.index, {}, **end)))
        return chunks


CHAT_ROUTES = [Route("/v1/chat/completions", chat_completions, methods=["POST"])]
