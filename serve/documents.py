"""Files in messages, as the texts that they are, or as pictures."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from llmjax.serve.errors import ApiError
from llmjax.serve.protocol.chat import ChatMessage
from llmjax.serve.protocol.pictures import FILE_PARTS, file_of
from llmjax.serve.sources import Sources

# How files begin that are pictures in one of the formats that are read.
PICTURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM")
MOST_BYTES = 64 * 2**20  # of all files of a request
PDF, PDF_WITHIN = b"%PDF-", 1024  # readers look for it in the first bytes


async def with_files_read(messages: Sequence[ChatMessage], sources: Sources, *, owner: str) -> Sequence[ChatMessage]:
    """Messages in which files are texts, headed by their names, or pictures. In a tool's result, which cannot be asked
    for again, a note stands for one that cannot be read.

    Args:
        owner: the request's API key, as ``owner_of`` has it.

    Raises:
        ApiError: a file cannot be had, or is neither; it names the part.
    """
    found, left = list(messages), MOST_BYTES
    for number, message in enumerate(messages):
        if not isinstance(message.content, list) or not any(_is_file(part) for part in message.content):
            continue
        content = []
        for i, part in enumerate(message.content):
            if not _is_file(part):
                content.append(part)
                continue
            try:
                part_read, size = await _read(part, f"messages.{number}.content.{i}", sources, owner)
                content.append(part_read)
            except ApiError as error:
                if message.role != "tool":
                    raise
                content.append({"type": "text", "text": f"[{part['type']}: not shown: {error.message}]"})
                continue
            if (left := left - size) < 0:
                raise ApiError(
                    f"the files of the request have more than {MOST_BYTES >> 20} MiB together",
                    param=f"messages.{number}.content.{i}",
                    code="invalid_value",
                )
        found[number] = message.model_copy(update={"content": content})
    return found


def _is_file(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and kind in FILE_PARTS


async def _read(part: Mapping[str, Any], path: str, sources: Sources, owner: str) -> tuple[dict[str, Any], int]:
    """The part in place of a file, and the file's bytes."""
    asked = file_of(part, path)
    data = await sources.read(asked, owner=owner)
    if data.startswith(PICTURES) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP"):
        given = asked.url is not None and asked.url[:5].lower() == "data:"
        url = asked.url if given else f"data:image/*;base64,{b64encode(data).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}, len(data)
    if PDF in data[:PDF_WITHIN]:
        raise _unread(asked.path, "PDF files are not read: send the text of the file, or its pages as pictures")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise _unread(asked.path, "the file is neither a text in UTF-8 nor a picture (PNG, JPEG, WebP, GIF, BMP)")
    return {"type": "text", "text": f"{asked.title}\n{text}" if asked.title else text}, len(data)


def _unread(path: str, problem: str) -> ApiError:
    return ApiError(f"`{path}`: {problem}", param=path, code="unsupported_parameter")
