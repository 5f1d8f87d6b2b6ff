"""What tools have found, in Anthropic's blocks, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmjax.serve.errors import ApiError
from llmjax.serve.protocol.chat import unread_part

Block = Mapping[str, Any]


def result_content(content: Any, path: str, unread: list[str], *, sees: bool) -> str | list[dict[str, Any]]:
    """A result's blocks as content of a chat: text and, for a model that sees, images.

    Args:
        unread: as for `result_text`.

    Raises:
        ApiError: it is neither a string nor blocks.
    """
    if not isinstance(content, list) or not any(isinstance(b, dict) and is_file(b, sees=sees) for b in content):
        return result_text(content, path, unread)
    return [
        dict(block) if is_file(block, sees=sees) else {"type": "text", "text": _read(block, f"{path}.{i}", unread)}
        for i, block in enumerate(blocks_of(content, path))
    ]


def is_image(block: Block) -> bool:
    """Whether a block is an image or a video."""
    return block.get("type") in ("image", "video")


def is_file(block: Block, *, sees: bool) -> bool:
    """Whether a block is a file that is read later: a document that is not text already or, if a model ``sees``, an
    image or a video."""
    if block.get("type") == "document":
        match block.get("source"):
            case {"type": "base64", "data": str()} | {"type": "url", "url": str()} | {"type": "file", "file_id": str()}:
                return True
        return False
    return sees and is_image(block)


def result_text(content: Any, path: str, unread: list[str]) -> str:
    """The text of a result's blocks. Of what is not text a note says so: a result cannot be asked for again.

    Args:
        unread: takes the names of blocks of which nothing can be read.

    Raises:
        ApiError: it is neither a string nor blocks.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_read(block, f"{path}.{i}", unread) for i, block in enumerate(blocks_of(content, path)))


def text_block(block: Block, path: str) -> str | None:
    """The text of a block that is one, or holds one; None: of a picture, a file …"""
    match block.get("type"):
        case "text":
            return string_of(block, "text", path)
        case "search_result":
            texts = [block.get("title"), block.get("source"), result_text(block.get("content"), f"{path}.content", [])]
        case "document":
            if (text := _document(block.get("source"), f"{path}.source")) is None:
                return None
            texts = [block.get("title"), block.get("context"), text]
        case "tool_reference":
            return f"tool: {string_of(block, 'tool_name', path)}"
        case _:
            return None
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def _document(source: Any, path: str) -> str | None:
    match source:
        case {"type": "text", "data": str(text)}:
            return text
        case {"type": "content", "content": content}:
            return result_text(content, f"{path}.content", [])
        case _:
            return None


def _read(block: Block, path: str, unread: list[str]) -> str:
    if (text := text_block(block, path)) is not None:
        return text
    unread.append(path)
    return unread_part(block.get("type"))


def blocks_of(content: Any, path: str) -> Sequence[Block]:
    """Content that is one text, or blocks, as blocks; raises ``ApiError``."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not content or not all(isinstance(block, dict) for block in content):
        raise ApiError(f"`{path}` must be a string or a list of blocks", param=path, code="invalid_type")
    return content


def string_of(block: Block, field: str, path: str) -> str:
    """A field that must be a string; raises ``ApiError``."""
    if not isinstance(value := block.get(field), str):
        raise ApiError(f"`{path}.{field}` must be a string", param=f"{path}.{field}", code="invalid_type")
    return value
