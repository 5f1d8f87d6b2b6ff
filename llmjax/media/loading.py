"""The image processor that a model's files describe."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.gguf.mmproj import encoder_of
from llmjax.checkpoint.gguf.model import hf_config
from llmjax.errors import CheckpointError
from llmjax.media.decoding import ImageLimits
from llmjax.media.processor import PillowProcessor
from llmjax.media.prompt import Frame
from llmjax.models.errors import UnsupportedModel
from llmjax.models.vision.family import VIDEO
from llmjax.models.vision.registry import preparation_of

Tokenize = Callable[[str], list[int]]
"""Text to ids, with special tokens recognized and none added."""
FILES = ("processor_config.json", "preprocessor_config.json")
VIDEO_FILE = "video_preprocessor_config.json"
MOST_COUNTED = 256  # pictures of a prompt where each has its number before it
MOST_LINE_BREAKS = 31  # that a vocabulary has as one token


def image_processor_of(
    folder: Path, config: Mapping[str, Any], tokenize: Tokenize, *, limits: ImageLimits | None = None
) -> PillowProcessor | None:
    """The processor of a model's folder; None: the model does not see.

    Args:
        folder: holds ``preprocessor_config.json``; what it lacks is as transformers has it.
        config: the content of config.json, the whole one, with ``vision_config``.

    Raises:
        CheckpointError: a file says what is not supported.
    """
    files: dict[str, Any] = {}
    for name in FILES:
        found = _read(folder / name)
        # Transformers 5 keeps the processors of pictures and videos inside the one of texts and both.
        video = {VIDEO: found[VIDEO]} if isinstance(found.get(VIDEO), dict) else {}
        files |= {**(found.get("image_processor") or {} if "image_processor" in found else found), **video}
    if found := _read(folder / VIDEO_FILE):
        files[VIDEO] = found
    return processor_from(config, files, tokenize, path=folder, limits=limits)


def _read(path: Path) -> dict[str, Any]:
    """A JSON file's object; empty where there is no file."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: it must be an object")
    return found


def processor_beside(
    path: Path, tokenize: Tokenize, *, mmproj: Path | None = None, limits: ImageLimits | None = None
) -> PillowProcessor | None:
    """`image_processor_of` for a .gguf file and its encoder's.

    Args:
        mmproj: the encoder's file; None: the one beside the other.
    """
    gguf = GGUFFile.open(path)
    encoder = encoder_of(gguf, hf_config(gguf), mmproj)
    if encoder is None:
        return None
    return processor_from(encoder.whole, encoder.processor, tokenize, path=path, limits=limits)


def processor_from(
    config: Mapping[str, Any],
    files: Mapping[str, Any],
    tokenize: Tokenize,
    *,
    path: Path,
    limits: ImageLimits | None = None,
) -> PillowProcessor | None:
    """The processor that a config.json and a preprocessor_config.json describe; arguments as for `image_processor_of`.

    Args:
        files: the content of preprocessor_config.json.
        path: the model, for messages.
    """
    try:
        preparation = preparation_of(config, files)
    except UnsupportedModel as error:
        raise CheckpointError(f"{path}: {error}") from None
    if preparation is None:
        return None
    ids = {text: tuple(tokenize(text)) for text in preparation.text.strings}
    row_token = preparation.row_token
    if isinstance(row_token, str):
        if len(found := tokenize(row_token)) != 1:
            raise CheckpointError(f"{path}: the tokenizer has no token {row_token!r}, at which images stand")
        row_token = found[0]
    breaks: list[int] = []
    if preparation.joins_lines:
        for count in range(1, MOST_LINE_BREAKS + 1):
            if len(found := tokenize("\n" * count)) != 1:
                break
            breaks += found
    frame = preparation.frame
    return PillowProcessor(
        preparation,
        ids,
        tuple(tokenize(preparation.placeholder)),
        row_token,
        tuple(breaks),
        limits or ImageLimits(),
        None if frame is None else Frame(tuple(tokenize(frame.start)), tuple(tokenize(frame.end))),
        counted=tuple(tuple(tokenize(preparation.counted.format(number))) for number in range(MOST_COUNTED))
        if preparation.counted
        else (),
        video_placeholder=() if preparation.video is None else tuple(tokenize(preparation.video.frame.placeholder)),
    )
