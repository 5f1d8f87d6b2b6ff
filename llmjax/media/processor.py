"""What turns a picture's bytes into what a model's encoder takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from llmjax.media.image import PreparedImage

Tokenize = Callable[[str], list[int]]
"""Text to ids, with special tokens recognized and none added."""


class ImageProcessor(Protocol):
    """Makes a model's prepared images.

    Attributes:
        placeholder: ids of the one placeholder that a picture has in a prompt before its tokens replace it.
        row_token_id: the id at which feature rows stand among a prepared image's tokens.
    """

    @property
    def placeholder(self) -> tuple[int, ...]: ...

    @property
    def row_token_id(self) -> int: ...

    def prepare(self, data: bytes) -> PreparedImage:
        """Decodes and prepares the picture in a file.

        Raises:
            InvalidRequest: it is not a picture that is supported, or it is too large; the reason in one line.
        """
        ...


def image_processor_of(folder: Path, config: Mapping[str, Any], tokenize: Tokenize) -> ImageProcessor | None:
    """The processor of a model's folder; None: the model has no vision.

    Args:
        folder: holds ``preprocessor_config.json`` or ``processor_config.json``.
        config: the content of config.json, the whole one, with ``vision_config``.
    """
    return None
