"""Chat messages as OpenAI's API has them, made into what chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from llmjax.errors import InvalidRequest

ContentFormat = Literal["string", "parts"]


def prepare_messages(messages: Sequence[Mapping[str, Any]], content_format: ContentFormat) -> list[dict[str, Any]]:
    """Messages for a template; the input is not changed.

    Args:
        messages: role, content and further fields, which templates may read.
        content_format: whether the template wants content as one string or as a list of parts.

    Raises:
        InvalidRequest: a message is not of OpenAI's form, or has content that is not text.
    """
    if not messages:
        raise InvalidRequest("messages is empty", field="messages")
    return [_prepare(message, f"messages[{i}]", content_format) for i, message in enumerate(messages)]


def _prepare(message: Mapping[str, Any], where: str, content_format: ContentFormat) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where} is not an object with a role", field="messages")
    prepared = dict(message)
    texts = _texts(message.get("content"), where)
    if content_format == "parts":
        prepared["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        prepared["content"] = "\n".join(texts)
    if message.get("tool_calls"):
        prepared["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message["tool_calls"])
        ]
    return prepared


def _texts(content: Any, where: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{where}.content is neither a string nor a list of parts", field="messages")
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequest(
                f"{where}.content[{i}]: parts of type {kind!r} are not supported, only text", field="messages"
            )
    return texts


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A copy with ``function.arguments`` parsed: the API has a string of JSON, templates want the object."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise InvalidRequest(f"{where} is not an object with a function", field="messages")
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str) or arguments is None:
        try:
            arguments = json.loads(arguments) if arguments else {}
        except ValueError as error:
            raise InvalidRequest(f"{where}.function.arguments is not JSON: {error}", field="messages") from error
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{where}.function.arguments is not a JSON object", field="messages")
    return {**call, "function": {**function, "arguments": dict(arguments)}}
