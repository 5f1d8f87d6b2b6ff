"""Blocks of Anthropic's messages as the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from llmjax.serve.errors import ApiError, cut
from llmjax.serve.protocol.chat import ChatMessage
from llmjax.serve.sealing import unsealed

Block = Mapping[str, Any]
ROLES = ("user", "assistant", "system")


def messages_of(
    system: str | Sequence[Block] | None, messages: Sequence[Block], ignored: list[str]
) -> list[ChatMessage]:
    """The conversation. Results of tools are messages of their own there.

    Args:
        ignored: takes the names of blocks of which nothing can be read.

    Raises:
        ApiError: a message is not one, or has something other than text.
    """
    turns: list[dict[str, Any]] = []
    if system:
        turns.append({"role": "system", "content": _text(system, "system")})
    for i, message in enumerate(messages):
        path = f"messages.{i}"
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ApiError(f"`{path}.role` must be user or assistant", param=f"{path}.role", code="invalid_value")
        blocks = _blocks(content, f"{path}.content")
        turns += _answer(blocks, path, ignored) if role == "assistant" else _question(blocks, role, path)
    return [ChatMessage.model_construct(**turn) for turn in turns]


def without_empty_answer(messages: Sequence[Block]) -> Sequence[Block]:
    """The messages but for a last one of the assistant in which nothing stands: Anthropic takes it for none."""
    *before, last = messages
    return before if before and last.get("role") == "assistant" and last.get("content") in ("", []) else messages


def is_prefill(messages: Sequence[Block]) -> bool:
    """Whether the last message is the beginning of the answer."""
    last = messages[-1]
    if last.get("role") != "assistant":
        return False
    content: Any = last.get("content")
    return isinstance(content, str) or (bool(content) and content[-1].get("type") == "text")


def _question(blocks: Sequence[Block], role: str, path: str) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        place = f"{path}.content.{i}"
        match block.get("type"):
            case "tool_result":
                content = _text(block.get("content") or "", f"{place}.content")
                turns.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id", place), "content": content})
            case "text":
                if not turns or turns[-1]["role"] != role:
                    turns.append({"role": role, "content": []})
                turns[-1]["content"].append({"type": "text", "text": _string(block, "text", place)})
            case kind:
                raise _unsupported(kind, place)
    return turns


def _answer(blocks: Sequence[Block], path: str, ignored: list[str]) -> list[dict[str, Any]]:
    texts: list[dict[str, str]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        place = f"{path}.content.{i}"
        match block.get("type"):
            case "text":
                texts.append({"type": "text", "text": _string(block, "text", place)})
            case "thinking" | "redacted_thinking" as kind:
                _think(block, "signature" if kind == "thinking" else "data", place, thoughts, ignored)
            case "tool_use":
                if not isinstance(block.get("input"), dict):
                    raise ApiError(f"`{place}.input` must be an object", param=f"{place}.input", code="invalid_type")
                arguments = orjson.dumps(block["input"]).decode()
                function = {"name": _string(block, "name", place), "arguments": arguments}
                calls.append({"id": _string(block, "id", place), "type": "function", "function": function})
            case kind:
                raise _unsupported(kind, place)
    content = texts[0]["text"] if len(texts) == 1 else texts or None
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return [turn]


def _think(block: Block, seal: str, place: str, thoughts: list[str], ignored: list[str]) -> None:
    text, data = block.get("thinking"), block.get(seal)
    if not isinstance(text, str) or not text:
        text = unsealed(data) if isinstance(data, str) else None
    if text is None:
        ignored.append(place)
    else:
        thoughts.append(text)


def _blocks(content: Any, path: str) -> Sequence[Block]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not content or not all(isinstance(block, dict) for block in content):
        raise ApiError(f"`{path}` must be a string or a list of blocks", param=path, code="invalid_type")
    return content


def _text(content: Any, path: str) -> str:
    """What may only be text, as a string or in blocks."""
    if isinstance(content, str):
        return content
    texts = []
    for i, block in enumerate(_blocks(content, path)):
        if block.get("type") != "text":
            raise _unsupported(block.get("type"), f"{path}.{i}")
        texts.append(_string(block, "text", f"{path}.{i}"))
    return "\n".join(texts)


def _string(block: Block, field: str, path: str) -> str:
    if not isinstance(value := block.get(field), str):
        raise ApiError(f"`{path}.{field}` must be a string", param=f"{path}.{field}", code="invalid_type")
    return value


def _unsupported(kind: Any, path: str) -> ApiError:
    message = f"`{path}.type`: {cut(str(kind))!r} blocks are not supported here"
    return ApiError(message, param=f"{path}.type", code="unsupported_parameter")
