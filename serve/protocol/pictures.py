"""Pictures, videos and files in messages, in the forms that the APIs have for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from llmjax.serve.errors import ApiError

Kind = Literal["image", "video", "file"]
PICTURE_PARTS: Mapping[str, Kind] = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "video_url": "video",
    "input_video": "video",
    "video": "video",
}
"""Types of parts that an encoder reads, and what they have."""
FILE_PARTS = frozenset({"file", "input_file", "document"})
"""Types of parts that have a file of text, or a picture."""
TEXT_ONLY = "this model reads text only; one that sees is, for example, Qwen/Qwen2.5-VL-3B-Instruct"
MOST_UUID = 256  # characters


@dataclass(frozen=True)
class Attachment:
    """A file in a request: its name there, and where its content is.

    Attributes:
        url: where it is; None: see the others.
        uuid: what its sender calls it, to refer to it later by that alone.
        file_id: a file that was uploaded.
        title: the name of the file, for the model.
    """

    path: str
    url: str | None
    kind: Kind = "image"
    uuid: str | None = None
    file_id: str | None = None
    title: str | None = None


def picture_of(part: Mapping[str, Any], path: str) -> Attachment:
    """The picture in a part of a message: OpenAI's ``image_url`` and ``input_image``, Anthropic's ``image``, or the
    video in vLLM's ``video_url``, which is ``input_video`` in responses and ``video`` among Anthropic's blocks.

    ``detail`` has no effect: the model's own processor decides on the size.

    Raises:
        ApiError: the part has no picture, or in another form.
    """
    kind = PICTURE_PARTS[part["type"]]
    if part.get("source") is not None or part["type"] in ("image", "video"):
        return _of_source(part.get("source"), f"{path}.source", kind)
    found, name = part.get(f"{kind}_url"), f"{path}.{kind}_url"
    if isinstance(found, Mapping) and found:
        found, name = found.get("url"), f"{name}.url"
    uuid = _text(part, "uuid", path)
    if uuid is not None and not 0 < len(uuid) <= MOST_UUID:
        raise ApiError(f"`{path}.uuid` must have 1 to {MOST_UUID} characters", param=f"{path}.uuid")
    if isinstance(found, str) and found:
        return Attachment(name, found, kind, uuid)
    if (file_id := _text(part, "file_id", path)) is not None:
        return Attachment(f"{path}.file_id", None, kind, uuid, file_id)
    if uuid is not None and not found and found != "":
        return Attachment(f"{path}.uuid", None, kind, uuid)
    raise ApiError(f"`{name}` must be a URL", param=name, code="invalid_type")


def file_of(part: Mapping[str, Any], path: str) -> Attachment:
    """The file in a part of a message: ``file`` of chats, ``input_file`` of responses, Anthropic's ``document``.

    Raises:
        ApiError: the part has no file, or in another form.
    """
    if part["type"] == "document":
        return _of_source(part.get("source"), f"{path}.source", "file", _text(part, "title", path))
    if part["type"] == "file":
        path, inner = f"{path}.file", part.get("file")
        if not isinstance(inner, Mapping):
            raise ApiError(f"`{path}` must be an object with file_data or file_id", param=path, code="invalid_type")
        part = inner
    title = _text(part, "filename", path)
    if (data := _text(part, "file_data", path)) is not None:
        url = data if data[:5].lower() == "data:" else f"data:;base64,{data}"
        return Attachment(f"{path}.file_data", url, "file", title=title)
    if (address := _text(part, "file_url", path)) is not None:
        return Attachment(f"{path}.file_url", address, "file", title=title)
    if (file_id := _text(part, "file_id", path)) is not None:
        return Attachment(f"{path}.file_id", None, "file", file_id=file_id, title=title)
    raise ApiError(f"`{path}` needs file_data, file_url or file_id", param=path, code="missing_required_parameter")


def _text(part: Mapping[str, Any], field: str, path: str) -> str | None:
    value = part.get(field)
    if value is not None and not isinstance(value, str):
        raise ApiError(f"`{path}.{field}` must be a string", param=f"{path}.{field}", code="invalid_type")
    return value


def _of_source(source: Any, path: str, kind: Kind, title: str | None = None) -> Attachment:
    """What Anthropic's blocks have under ``source``."""
    match source:
        case {"type": "base64", "data": str(data)}:
            return Attachment(path, f"data:{kind}/*;base64,{data}", kind, title=title)
        case {"type": "url", "url": str(url)}:
            return Attachment(path, url, kind, title=title)
        case {"type": "file", "file_id": str(file_id)}:
            return Attachment(path, None, kind, file_id=file_id, title=title)
    raise ApiError(
        f"`{path}` must be of type base64, with data, of type url, or of type file", param=path, code="invalid_type"
    )
