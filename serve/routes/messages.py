"""/v1/messages: Anthropic's API."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from llmjax.parsing.choice import reads
from llmjax.serve.body import parse, read_json
from llmjax.serve.context import Server, cache_salt_of, client_of, ignored_fields, owner_of, record_of, server_of
from llmjax.serve.errors import ApiError, anthropic_error, cut
from llmjax.serve.generation import guarded
from llmjax.serve.messages.conversation import is_prefill, messages_of, without_empty_answer
from llmjax.serve.messages.writer import MessageWriter
from llmjax.serve.other_names import other_names
from llmjax.serve.prompts import CHARS_PER_PART, chat_prompt, off_loop, read_tools, template_source
from llmjax.serve.protocol.chat import ChatRequest
from llmjax.serve.protocol.messages import CountTokensRequest, MessagesRequest
from llmjax.serve.protocol.tools import MCP_ELSEWHERE, calls_allowed
from llmjax.serve.sse import EventStream, named_event
from llmjax.serve.transfer import transfer_answer
from llmjax.serve.turn import Said, Turn, prepare, switches_of_thinking, thinking_variables

NAMES = {
    r"tools\.(\d+)\.function\.parameters": r"tools.\1.input_schema",
    r"tools\.(\d+)\.function": r"tools.\1",
    r"response_format": "output_config.format",
    r"thinking_token_budget": "thinking.budget_tokens",
    r"stop": "stop_sequences",
}
# Tools of Anthropic's server that Claude Code offers beside others: a model may answer without.
UNUSED_TOOLS = re.compile(r"(advisor|tool_search_tool(_regex|_bm25)?)(_[0-9]{8})?")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


async def create_message(request: Request) -> Response | ASGIApp:
    """An answer in Anthropic's form, whole or as a stream."""
    server = server_of(request)
    config = server.config
    body = parse(await read_json(request), MessagesRequest, ignored=ignored_fields(request))
    record = record_of(request)
    with other_names(NAMES):
        chat = await _chat(server, body, record.ignored)
        chat.stream, chat.max_tokens = body.stream, body.max_tokens
        chat.temperature, chat.top_p, chat.top_k, chat.seed = body.temperature, body.top_p, body.top_k, body.seed
        chat.stop, chat.stop_token_ids, chat.ignore_eos = body.stop_sequences, body.stop_token_ids, body.ignore_eos
        chat.priority, chat.kv_transfer_params = body.priority, body.kv_transfer_params
        chat.user = None if body.metadata is None else body.metadata.user_id
        salt = cache_salt_of(request, body.cache_salt)
        id = f"msg_{uuid.uuid4().hex}"
        client = client_of(request)
        turn = await prepare(server, chat, record=record, cache_salt=salt, client=client, id=id, cut=True)
    answer = MessageAnswer(server=server, body=body, turn=turn)
    if body.stream:
        return EventStream(
            answer.events(),
            keep_alive=config.sse_keep_alive_interval,
            timeout=config.request_timeout,
            end=b"",
            failed=lambda error: named_event(anthropic_error(error, record.id)),
        )
    whole = await guarded(request.receive, answer.whole(), timeout=config.request_timeout)
    return Response(whole, media_type="application/json")


async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation has."""
    server = server_of(request)
    body = parse(await read_json(request), CountTokensRequest, ignored=ignored_fields(request))
    server.check_model(body.model)
    with other_names(NAMES):
        chat = await _chat(server, body, record_of(request).ignored)
        tools = await read_tools(chat)
        tools = tools if calls_allowed(chat.tool_choice, tools) else []
        variables = thinking_variables(server, chat, template_source(server, chat, with_tools=bool(tools)))
        owner, salt = owner_of(request), cache_salt_of(request, None)
        prompt = await chat_prompt(server, chat, tools=tools, owner=owner, cache_salt=salt, variables=variables)
    return Response(orjson.dumps({"input_tokens": len(prompt.token_ids)}), media_type="application/json")


async def _chat(server: Server, body: CountTokensRequest, ignored: list[str]) -> ChatRequest:
    """The chat request that a request comes to."""
    ignored += body.unheeded_hints()
    ignored += [f"tools.{i}" for i, tool in enumerate(body.tools or []) if _is_unused(tool)]
    turns = without_empty_answer(body.messages)
    blocks = sum(len(content) if isinstance(content := turn.get("content"), list) else 1 for turn in turns)
    messages = await off_loop(
        lambda: messages_of(body.system, turns, ignored, sees=server.pictures is not None),
        size=CHARS_PER_PART * (blocks + len(turns)),
    )
    prefill = is_prefill(turns)
    chat = ChatRequest.model_construct(
        model=body.model,
        messages=messages,
        add_generation_prompt=not prefill,
        continue_final_message=prefill,
        tools=[_tool(tool, f"tools.{i}") for i, tool in enumerate(body.tools or []) if not _is_unused(tool)],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=not (body.tool_choice or {}).get("disable_parallel_tool_use", False),
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        response_format=_response_format(body),
    )
    _think(server, body, chat, ignored)
    return chat


def _think(server: Server, body: CountTokensRequest, chat: ChatRequest, ignored: list[str]) -> None:
    """Thinking as the model knows it; what it does not know is said to be ignored, for clients ask all models alike."""
    source = template_source(server, chat, with_tools=bool(chat.tools))
    thinking, effort = body.thinking, None if body.output_config is None else body.output_config.effort
    wanted = thinking is not None and thinking.wanted
    marks = server.formats.parsers(source).reasoning_marks
    chat.include_reasoning = wanted
    if switches_of_thinking(source):
        chat.thinking = wanted
    elif wanted and marks is None:
        ignored.append("thinking")
    if wanted and thinking is not None and thinking.budget_tokens is not None and marks is not None:
        chat.thinking_token_budget = thinking.budget_tokens
    if effort is not None:
        if reads(source, "reasoning_effort"):
            chat.reasoning_effort = effort
        else:
            ignored.append("output_config.effort")


def _is_unused(tool: Mapping[str, Any]) -> bool:
    return isinstance(kind := tool.get("type"), str) and UNUSED_TOOLS.fullmatch(kind) is not None


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    if (kind := tool.get("type")) == "mcp_toolset":
        raise ApiError(f"`{path}.type`: {MCP_ELSEWHERE}", param=f"{path}.type", code="unsupported_parameter")
    if kind not in (None, "custom"):
        raise ApiError(
            f"`{path}.type`: {cut(str(kind))!r} tools are not supported, only those with an input_schema: "
            "the server runs no tools",
            param=f"{path}.type",
            code="unsupported_parameter",
        )
    if "input_schema" not in tool:
        raise ApiError(f"`{path}.input_schema` is required", param=f"{path}.input_schema")
    function = {"parameters": tool["input_schema"]}
    fields = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**fields, **function}}


def _tool_choice(choice: Mapping[str, Any] | None) -> Any:
    match choice:
        case None:
            return None
        case {"type": "tool"}:
            return {"type": "function", "function": {"name": choice.get("name")}}
        case {"type": "auto" | "any" | "none" as kind}:
            return CHOICES[kind]
    raise ApiError("`tool_choice.type` must be auto, any, none or tool", param="tool_choice.type", code="invalid_value")


def _response_format(body: CountTokensRequest) -> dict[str, Any] | None:
    wanted = None if body.output_config is None else body.output_config.format
    if wanted is None:
        return None
    if wanted.get("type") != "json_schema":
        raise ApiError(
            "`output_config.format.type` must be json_schema", param="output_config.format.type", code="invalid_value"
        )
    return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema"), "strict": True}}


@dataclass(frozen=True, kw_only=True)
class MessageAnswer:
    """Turns what the model says into a message, whole or in events."""

    server: Server
    body: MessagesRequest
    turn: Turn

    def _writer(self) -> MessageWriter:
        thinking = self.body.thinking
        message = {
            "id": self.turn.job.id,
            "type": "message",
            "role": "assistant",
            "model": self.turn.job.model,
        }
        return MessageWriter(message, show_thinking=thinking is None or thinking.display != "omitted")

    async def whole(self) -> bytes:
        """Anthropic's ``Message`` as JSON."""
        writer = self._writer()
        self._write(writer, await self.turn.all_said())
        return orjson.dumps(writer.message | transfer_answer(self.server.engine, self.turn.job))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Anthropic's stream."""
        writer, reader, begun = self._writer(), self.turn.form.reader(), False
        async with aclosing(self.turn.outputs()) as parts:
            async for part in parts:
                said = self.turn.said(part, reader)
                if not begun:
                    begun = True
                    for event in writer.begin(self._usage()):
                        yield named_event(event)
                for event in self._write(writer, said):
                    yield named_event(event)

    def _write(self, writer: MessageWriter, said: Said) -> list[dict[str, Any]]:
        events = [event for one in said.events for event in writer.write(one)]
        if said.finish_reason is not None:
            sequence = said.choice.stop_reason
            sequence = sequence if isinstance(sequence, str) else None
            reason = "stop_sequence" if sequence is not None else self._reason(said.finish_reason)
            events += writer.finish(reason=reason, sequence=sequence, usage=self._usage())
        return events

    def _reason(self, reason: str) -> str:
        if reason == "length":
            (params,) = self.turn.job.params
            return "max_tokens" if params.max_tokens == self.body.max_tokens else "model_context_window_exceeded"
        return "tool_use" if reason == "tool_calls" else "end_turn"

    def _usage(self) -> dict[str, Any]:
        usage = self.turn.tally.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        usage_fields = {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }
        if (details := usage.get("completion_tokens_details")) is not None:
            usage_fields["output_tokens_details"] = {"thinking_tokens": details["reasoning_tokens"]}
        return usage_fields


MESSAGE_ROUTES = [
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
