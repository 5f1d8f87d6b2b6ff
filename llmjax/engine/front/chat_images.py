"""Pictures and videos in the messages of an offline chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmjax.base64_text import from_base64
from llmjax.engine.front.images import TEXT_ONLY, Images
from llmjax.errors import InvalidRequest

KINDS = {
    **dict.fromkeys(("image_url", "image", "image_pil", "input_image"), "image"),
    **dict.fromkeys(("video_url", "video"), "video"),
}
"""Types of parts, and what they have."""


def with_pictures(messages: Sequence[Any], images: Images | None) -> tuple[list[Any], dict[str, list[Any]]]:
    """Messages in which pictures are what a chat template knows of them, and ``multi_modal_data`` with the pictures and
    videos, in order.

    A picture is a part of type ``image`` with a path, bytes or an image of Pillow under ``image`` (vLLM's
    ``image_pil`` likewise), or of type ``image_url`` with a path or a data: URL. A video is one of type ``video`` with
    a path, bytes or frames under ``video``, or of type ``video_url``.

    Args:
        images: None: the model sees none.

    Raises:
        InvalidRequest: there is a picture or a video, and the model sees none; or a part has none.
    """
    data: dict[str, list[Any]] = {}

    def shown(part: Any) -> Any:
        if not isinstance(part, Mapping) or part.get("type") not in KINDS:
            return part
        if images is None:
            raise InvalidRequest(TEXT_ONLY, field="messages")
        kind = KINDS[part["type"]]
        data.setdefault(kind, []).append(_picture_of(part))
        return {"type": kind, "text": images.placeholder if kind == "image" else images.video_placeholder}

    def turn(message: Any) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            return message
        return {**message, "content": [shown(part) for part in content]}

    return [turn(message) for message in messages], data


def _picture_of(part: Mapping[str, Any]) -> Any:
    found = part.get(part["type"]) if part["type"] != "input_image" else part.get("image_url")
    if isinstance(found, Mapping):
        found = found.get("url")
    if found is None:
        raise InvalidRequest(f"a part of type {part['type']} has nothing under that name", field="messages")
    if isinstance(found, str) and found[:5].lower() == "data:":
        try:
            return from_base64(found.partition(",")[2])
        except ValueError:
            raise InvalidRequest("a data: URL must be of the form data:image/png;base64,…", field="messages") from None
    if isinstance(found, str) and found[:5].lower() in ("http:", "https"):
        raise InvalidRequest("nothing is downloaded here: give a path, bytes or a data: URL", field="messages")
    return found.removeprefix("file://") if isinstance(found, str) else found
