"""Files in messages become texts or pictures, or are refused."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from llmjax.serve.documents import with_files_read
from llmjax.serve.errors import ApiError
from llmjax.serve.files import FileStore
from llmjax.serve.protocol.chat import ChatMessage
from llmjax.serve.sources import Sources


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    return Sources(files=FileStore(tmp_path, most_bytes=2**20, lifetime=60.0))


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def read(part: Any, sources: Sources, *, role: str = "user") -> Any:
    message = ChatMessage.model_validate({"role": role, "content": [{"type": "text", "text": "?"}, part]})
    (found,) = await with_files_read([message], sources, owner="one")
    assert isinstance(found.content, list) and found.content[0] == {"type": "text", "text": "?"}
    return found.content[1]


TEXT = {"type": "text", "text": "a.md\n# Grüße"}
GREETING = "# Grüße".encode()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "file", "file": {"file_data": f"data:text/plain;base64,{b64(GREETING)}", "filename": "a.md"}},
        {"type": "input_file", "file_data": b64(b"\xef\xbb\xbf" + GREETING), "filename": "a.md"},
        {
            "type": "document",
            "source": {"type": "base64", "media_type": "text/plain", "data": b64(GREETING)},
            "title": "a.md",
        },
    ],
)
async def test_a_text_is_read(sources: Sources, part: Any) -> None:
    assert await read(part, sources) == TEXT
    assert await read(part, sources, role="tool") == TEXT


async def test_an_uploaded_file_is_read(sources: Sources) -> None:
    path = sources.files.new_path()
    path.write_bytes(GREETING)
    file = sources.files.keep(path, owner="one", filename="b", purpose="user_data")
    for part in (
        {"type": "file", "file": {"file_id": file.id, "filename": "a.md"}},
        {"type": "input_file", "file_id": file.id, "filename": "a.md"},
        {"type": "document", "source": {"type": "file", "file_id": file.id}, "title": "a.md"},
    ):
        assert await read(part, sources) == TEXT


@pytest.mark.parametrize(
    "data", [b"\x89PNG\r\n\x1a\n...", b"\xff\xd8\xff\xe0", b"GIF89a", b"RIFF1234WEBPVP8 ", b"BM12"]
)
async def test_a_picture_is_a_picture(sources: Sources, data: bytes) -> None:
    found = await read({"type": "input_file", "file_data": b64(data)}, sources)
    assert found["type"] == "image_url"
    assert base64.b64decode(found["image_url"]["url"].partition(",")[2]) == data


@pytest.mark.parametrize(
    ("part", "reason", "param"),
    [
        ({"type": "file", "file": {"file_data": b64(b"%PDF-1.7\n...")}}, "PDF files are not read", "file.file_data"),
        ({"type": "input_file", "file_data": b64(b"\xff\x00\xfe")}, "neither a text in UTF-8", "file_data"),
        ({"type": "input_file", "file_data": b64(b"a\0b")}, "neither a text in UTF-8", "file_data"),
        ({"type": "input_file", "file_data": "%%"}, "not valid base64", "file_data"),
        ({"type": "input_file", "file_data": 3}, "must be a string", "file_data"),
        ({"type": "input_file", "file_url": "https://x/y"}, "downloads no images", "file_url"),
        ({"type": "input_file", "file_url": "file:///etc/passwd"}, "reads no files", "file_url"),
        ({"type": "input_file", "file_id": "file-1"}, "there is no file", "file_id"),
        ({"type": "input_file"}, "needs file_data, file_url or file_id", ""),
        ({"type": "file", "file": "x"}, "must be an object", "file"),
        ({"type": "document", "source": {"type": "x"}}, "must be of type base64", "source"),
    ],
)
async def test_other_files_are_refused(sources: Sources, part: Any, reason: str, param: str) -> None:
    with pytest.raises(ApiError, match=reason) as caught:
        await read(part, sources)
    assert caught.value.param == f"messages.0.content.1{'.' if param else ''}{param}"
    # A result of a tool cannot be asked for again.
    found = await read(part, sources, role="tool")
    assert found["type"] == "text" and "not shown" in found["text"] and reason in found["text"]


async def test_the_files_of_a_request_are_bounded(sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmjax.serve.documents.MOST_BYTES", 10)
    parts = [{"type": "input_file", "file_data": b64(b"sixsix")}] * 2
    message = ChatMessage.model_validate({"role": "user", "content": parts})
    with pytest.raises(ApiError, match=r"more than .* together") as caught:
        await with_files_read([message], sources, owner="one")
    assert caught.value.param == "messages.0.content.1"
