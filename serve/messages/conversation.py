"""Blocks of Anthropic's messages as the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmjax.serve.errors import ApiError, cut
from llmjax.serve.messages.call_ids import read_id
from llmjax.serve.messages.results import Block, blocks_of, is_file, is_image, result_content, string_of, text_block
from llmjax.serve.protocol.chat import ChatMessage
from llmjax.serve.protocol.pictures import TEXT_ONLY
from llmjax.serve.sealing import unsealed

ROLES = ("user", "assistant", "system")
# What Claude Code puts before the system prompt for its maker's accounting. It changes with every request, and with it
# all that a prefix cache could find.
BILLING = "x-anthropic-billing-header:"
# Blocks of an answer that tell what the tools of Anthropic's server have done, and what that server keeps.
OF_THE_SERVER = frozenset({"server_tool_use", "mcp_tool_use", "container_upload"})


def messages_of(
    system: str | Sequence[Block] | None, messages: Sequence[Block], ignored: list[str], *, sees: bool = False
) -> list[ChatMessage]:
    """The conversation. Results of tools are messages of their own there.

    Args:
        ignored: takes the names of blocks of which nothing can be read.
        sees: whether the model sees images.

    Raises:
        ApiError: a message is not one, or has something that the model cannot read.
    """
    turns: list[dict[str, Any]] = []
    if system and (text := _system(system, ignored)):
        turns.append({"role": "system", "content": text})
    for i, message in enumerate(messages):
        path = f"messages.{i}"
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ApiError(f"`{path}.role` must be user or assistant", param=f"{path}.role", code="invalid_value")
        if role == "assistant":
            blocks = [] if content == [] else blocks_of(content, f"{path}.content")
            turns += _answer(blocks, path, ignored)
        else:
            turns += _question(blocks_of(content, f"{path}.content"), role, path, ignored, sees=sees)
    return [ChatMessage.model_construct(**turn) for turn in turns]


def without_empty_answer(messages: Sequence[Block]) -> Sequence[Block]:
    """The messages without empty texts in a last one of the assistant, and without that one if nothing else stands
    there: Anthropic takes it for none."""
    *before, last = messages
    if last.get("role") != "assistant" or not before:
        return messages
    content = last.get("content")
    if isinstance(content, list):
        content = [block for block in content if block != {"type": "text", "text": ""}]
    return before if content in ("", []) else [*before, {**last, "content": content}]


def is_prefill(messages: Sequence[Block]) -> bool:
    """Whether the last message is the beginning of the answer."""
    last = messages[-1]
    if last.get("role") != "assistant":
        return False
    content: Any = last.get("content")
    return isinstance(content, str) or (bool(content) and content[-1].get("type") == "text")


def _system(system: str | Sequence[Block], ignored: list[str]) -> str:
    """The system prompt's text, without what only its sender's accounting reads."""
    if isinstance(system, str):
        return system
    texts = [_plain_text(block, f"system.{i}") for i, block in enumerate(blocks_of(system, "system"))]
    if texts[0].startswith(BILLING) and "\n" not in texts[0].strip():
        ignored.append("system.0")
        del texts[0]
    return "\n".join(texts)


def _plain_text(block: Block, path: str) -> str:
    if block.get("type") != "text":
        raise _unsupported(block.get("type"), path)
    return string_of(block, "text", path)


def _question(blocks: Sequence[Block], role: str, path: str, ignored: list[str], *, sees: bool) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        place = f"{path}.content.{i}"
        if block.get("type") == "tool_result":
            id = read_id(string_of(block, "tool_use_id", place))
            content = result_content(block.get("content") or "", f"{place}.content", ignored, sees=sees)
            turns.append({"role": "tool", "tool_call_id": id, "content": content})
            continue
        if is_image(block) and not sees:
            raise ApiError(f"`{place}.type`: {TEXT_ONLY}", param=f"{place}.type", code="unsupported_parameter")
        if is_file(block, sees=sees):
            part = dict(block)
        elif (text := text_block(block, place)) is not None:
            part = {"type": "text", "text": text}
        else:
            raise _unsupported(block.get("type"), place)
        if not turns or turns[-1]["role"] != role:
            turns.append({"role": role, "content": []})
        turns[-1]["content"].append(part)
    return turns


def _answer(blocks: Sequence[Block], path: str, ignored: list[str]) -> list[dict[str, Any]]:
    texts: list[dict[str, str]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        place = f"{path}.content.{i}"
        match block.get("type"):
            case "text":
                texts.append({"type": "text", "text": string_of(block, "text", place)})
            case "compaction" if isinstance(block.get("content"), str):
                texts.append({"type": "text", "text": block["content"]})
            case "thinking" | "redacted_thinking" as kind:
                _think(block, "signature" if kind == "thinking" else "data", place, thoughts, ignored)
            case "tool_use":
                if "input" not in block:
                    raise ApiError(f"`{place}.input` is required", param=f"{place}.input", code="invalid_type")
                function = {"name": string_of(block, "name", place), "arguments": block["input"]}
                id = read_id(string_of(block, "id", place))
                calls.append({"id": id, "type": "function", "function": function})
            case str(kind) if kind in OF_THE_SERVER or kind.endswith("_tool_result"):
                ignored.append(place)
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


def _unsupported(kind: Any, path: str) -> ApiError:
    message = f"`{path}.type`: {cut(str(kind))!r} blocks are not supported here"
    return ApiError(message, param=f"{path}.type", code="unsupported_parameter")
