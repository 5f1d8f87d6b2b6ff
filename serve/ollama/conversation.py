"""Ollama's requests as those that the server answers anyway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmjax.parsing.choice import reads
from llmjax.serve.context import Server
from llmjax.serve.errors import ApiError
from llmjax.serve.prompts import template_source
from llmjax.serve.protocol.chat import ChatMessage, ChatRequest
from llmjax.serve.protocol.common import GenerationRequest
from llmjax.serve.protocol.completions import CompletionRequest
from llmjax.serve.protocol.llama_cpp import LlamaCppSampling
from llmjax.serve.protocol.ollama import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaGenerating,
    OllamaMessage,
    OllamaOptions,
    Think,
)
from llmjax.serve.turn import switches_of_thinking

TAG = ":latest"  # that clients add to names without one
# A request's fields by those of the request that is made of it, for errors.
NAMES = {
    r"messages\.(\d+)\.content\.(\d+)(\.source|\.type)?": r"messages.\1.images.\2",
    r"max_tokens": "options.num_predict",
    r"repetition_penalty": "options.repeat_penalty",
    r"response_format": "format",
    **{name: f"options.{name}" for name in LlamaCppSampling.model_fields},
}
NAMES_OF_PROMPT = {r"messages\.\d+\.content\.(\d+)(\.source|\.type)?": r"images.\1", r"messages": "prompt", **NAMES}


def named(server: Server, model: str | None) -> str | None:
    """The name that a request gives a model, without the tag that says nothing.

    Raises:
        ApiError: the server has no such model.
    """
    name = bare(model)
    server.check_model(name)
    return name


def bare(model: str | None) -> str | None:
    """A name without the tag that says nothing."""
    return None if model is None else model.removesuffix(TAG)


def chat_of(server: Server, body: OllamaChatRequest | OllamaGenerateRequest, ignored: list[str]) -> ChatRequest:
    """The chat request that a request comes to.

    Args:
        ignored: takes the names of fields without effect.

    Raises:
        ApiError: a field is wrong.
    """
    tools = None
    if isinstance(body, OllamaChatRequest):
        messages, tools = messages_of(body.messages or []), body.tools
    else:
        system = [OllamaMessage(role="system", content=body.system)] if body.system else []
        messages = messages_of([*system, OllamaMessage(role="user", content=body.prompt or "", images=body.images)])
    chat = ChatRequest.model_construct(
        model=named(server, body.model), messages=messages, tools=tools, response_format=_response_format(body)
    )
    _sample(chat, body, ignored)
    _think(server, chat, body.think, ignored)
    return chat


def completion_of(server: Server, body: OllamaGenerateRequest, ignored: list[str]) -> CompletionRequest:
    """The completion that a request for a plain prompt comes to; see `chat_of`."""
    body.check_plain()
    made = CompletionRequest.model_construct(
        model=named(server, body.model),
        prompt=body.prompt or "",
        suffix=body.suffix or None,
        response_format=_response_format(body),
    )
    _sample(made, body, ignored)
    return made


def messages_of(messages: Sequence[OllamaMessage]) -> list[ChatMessage]:
    """The conversation. A result belongs to the call that its id names, to one of its tool, or to the first without."""
    turns: list[ChatMessage] = []
    open_calls: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        turn: dict[str, Any] = {"role": message.role, "content": _content(message)}
        match message.role:
            case "assistant":
                if message.thinking:
                    turn["reasoning_content"] = message.thinking
                open_calls = [
                    _call(call, f"messages.{i}.tool_calls.{j}", f"call_{i}_{j}")
                    for j, call in enumerate(message.tool_calls or [])
                ]
                if open_calls:
                    turn["tool_calls"], open_calls = open_calls, [*open_calls]
            case "tool":
                call = _answered(open_calls, message)
                turn["tool_call_id"] = message.tool_call_id or (f"call_{i}" if call is None else call["id"])
                if (name := message.tool_name or (None if call is None else call["function"]["name"])) is not None:
                    turn["name"] = name
                if call is not None:
                    open_calls.remove(call)
        turns.append(ChatMessage.model_construct(**turn))
    return turns


def _content(message: OllamaMessage) -> str | list[dict[str, Any]]:
    """Pictures stand before the text, as Ollama has it."""
    text = message.content or ""
    if not message.images:
        return text
    pictures = [{"type": "image", "source": {"type": "base64", "data": data}} for data in message.images]
    return [*pictures, {"type": "text", "text": text}]


def _call(call: dict[str, Any], path: str, id: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"`{path}.function` must have a name", param=f"{path}.function", code="invalid_type")
    given = call.get("id")
    return {
        "id": given if isinstance(given, str) and given else id,
        "type": "function",
        "function": {"name": function["name"], "arguments": function.get("arguments") or {}},
    }


def _answered(calls: Sequence[dict[str, Any]], message: OllamaMessage) -> dict[str, Any] | None:
    if message.tool_call_id:
        return next((call for call in calls if call["id"] == message.tool_call_id), None)
    named = [call for call in calls if message.tool_name in (None, call["function"]["name"])]
    return named[0] if named else None


def _response_format(body: OllamaGenerating) -> dict[str, Any] | None:
    if not body.format:
        return None
    if body.format == "json":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": body.format, "strict": True}}


def _sample(made: GenerationRequest, body: OllamaGenerating, ignored: list[str]) -> None:
    """How tokens are sampled, and how many."""
    options = body.options or OllamaOptions()
    options.check()
    ignored += body.without_effect()
    made.stream = body.streams
    made.temperature, made.top_p, made.top_k = options.temperature, options.top_p, options.top_k
    made.min_p, made.seed, made.stop = options.min_p, options.seed, options.stop
    made.repetition_penalty, made.repeat_last_n = options.repeat_penalty, options.repeat_last_n
    made.presence_penalty, made.frequency_penalty = options.presence_penalty, options.frequency_penalty
    if options.num_predict is not None and options.num_predict > 0:  # 0 and below: as many as fit, as its runner has it
        made.max_tokens = options.num_predict


def _think(server: Server, chat: ChatRequest, think: Think | None, ignored: list[str]) -> None:
    """Thinking as the model knows it; what it does not know is said to be ignored."""
    if think is None:
        return
    source = template_source(server, chat, with_tools=bool(chat.tools))
    if isinstance(think, str) and reads(source, "reasoning_effort"):
        chat.reasoning_effort = think
    elif switches_of_thinking(source):
        chat.thinking = bool(think)
    elif think and server.formats.parsers(source).reasoning_marks is None:
        ignored.append("think")
