"""Chat messages in OpenAI's form: checked, and brought to the names that templates read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmjax.errors import InvalidRequest
from llmjax.templating.arguments import read_arguments

# What servers call a message's reasoning; the first is the name that most templates read.
REASONING = ("reasoning_content", "thinking", "reasoning")
PARTS = ("text", "image", "video")  # types of parts that templates know


def checked_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Copies of the messages; the input is not changed.

    Content stays a string, a list of text parts or None; parts that are strings become objects. Arguments of tool
    calls, which the API has as a string of JSON, become the object, and stay text where they are none.

    Args:
        messages: role, content and further fields, which templates may read.

    Raises:
        InvalidRequest: a message is not of OpenAI's form, or has content that is not text.
    """
    if not messages:
        raise InvalidRequest("messages is empty", field="messages")
    return [_checked(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where} is not an object with a role", field="messages")
    checked = {**message, "content": _content(message.get("content"), where)}
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is not None:
        checked = {"thinking": reasoning, **checked, "reasoning_content": reasoning}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise InvalidRequest(f"{where}.tool_calls is not a list", field="messages")
        checked["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return checked


def _content(content: Any, where: str) -> str | list[dict[str, Any]] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"{where}.content is neither a string nor a list of parts", field="messages")
    return [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict) and part.get("type") in PARTS and isinstance(part.get("text"), str):
        return part  # the text of an image or a video is what stands for it where a template takes no parts
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise InvalidRequest(f"{where}: parts of type {str(kind)[:40]!r} are not supported, only text", field="messages")


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise InvalidRequest(f"{where} is not an object with a function", field="messages")
    arguments = read_arguments(call["function"].get("arguments"))
    return {**call, "function": {**call["function"], "arguments": arguments}}
