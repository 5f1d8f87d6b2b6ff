"""Pictures and videos in messages, in the forms that the APIs have for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from llmjax.serve.errors import ApiError

Kind = Literal["image", "video"]
PICTURE_PARTS: Mapping[str, Kind] = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "video_url": "video",
}
"""Types of parts, and what they have."""
TEXT_ONLY = "this model reads text only; one that sees is, for example, Qwen/Qwen2.5-VL-3B-Instruct"


@dataclass(frozen=True)
class Picture:
    """A picture or a video in a request: its name there, and where it is."""

    path: str
    url: str
    kind: Kind = "image"


def picture_of(part: Mapping[str, Any], path: str) -> Picture:
    """The picture in a part of a message: OpenAI's ``image_url`` and ``input_image``, Anthropic's ``image``, or the
    video in vLLM's ``video_url``.

    ``detail`` has no effect: the model's own processor decides on the size.

    Raises:
        ApiError: the part has no picture, or in another form.
    """
    if part.get("type") == "image":
        return _of_anthropic(part.get("source"), f"{path}.source")
    kind = PICTURE_PARTS[part["type"]]
    found, name = part.get(f"{kind}_url"), f"{path}.{kind}_url"
    if isinstance(found, Mapping):
        found, name = found.get("url"), f"{name}.url"
    if isinstance(found, str) and found:
        return Picture(name, found, kind)
    if part.get("file_id") is not None:
        raise ApiError(
            f"`{path}.file_id` is not supported: send a data: URL as image_url",
            param=f"{path}.file_id",
            code="unsupported_parameter",
        )
    raise ApiError(f"`{name}` must be a URL", param=name, code="invalid_type")


def _of_anthropic(source: Any, path: str) -> Picture:
    match source:
        case {"type": "base64", "data": str(data)}:
            return Picture(path, f"data:image/*;base64,{data}")
        case {"type": "url", "url": str(url)}:
            return Picture(path, url)
    raise ApiError(f"`{path}` must be of type base64, with data, or of type url", param=path, code="invalid_type")
