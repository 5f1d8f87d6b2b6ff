"""The image processor that a model's files describe."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.checkpoint.gguf.mmproj import encoder_of
from llmjax.checkpoint.gguf.model import hf_config
from llmjax.checkpoint.mistral_layout import PROCESSOR, is_native, processor_in
from llmjax.errors import CheckpointError, InvalidRequest
from llmjax.media.decoding import ImageLimits
from llmjax.media.processor import PillowProcessor
from llmjax.media.prompt import Frame
from llmjax.models.errors import UnsupportedModel
from llmjax.models.vision.family import VIDEO
from llmjax.models.vision.preparation import Preparation
from llmjax.models.vision.registry import preparation_of, vision_family

Tokenize = Callable[[str], list[int]]
"""Text to ids, with special tokens recognized and none added."""
FILES = ("processor_config.json", PROCESSOR)
VIDEO_FILE = "video_preprocessor_config.json"
MOST_COUNTED = 256  # pictures of a prompt where each has its number before it
MOST_LINE_BREAKS = 31  # that a vocabulary has as one token


class Watched(dict[str, Any]):
    """A JSON object that knows which of its keys were asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


@dataclass(frozen=True, kw_only=True, eq=False)
class ProcessorSource:
    """What a model's files say of its processor.

    Attributes:
        config: the content of config.json, the whole one, with ``vision_config``.
        files: the content of preprocessor_config.json; what it lacks is as transformers has it.
        tokenize: see ``Tokenize``.
        path: the model, for messages.
        limits: how large pictures may be.
        first: the text of the token that begins texts or, where the tokenizer has none, of the one that ends them.
    """

    config: Mapping[str, Any]
    files: Mapping[str, Any]
    tokenize: Tokenize
    path: Path
    first: str = ""
    limits: ImageLimits = field(default_factory=ImageLimits)

    def processor(self) -> PillowProcessor | None:
        """The processor; None: the model does not see.

        Raises:
            CheckpointError: a file says what is not supported.
        """
        try:
            preparation = preparation_of(self.config, self.files)
        except UnsupportedModel as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        return None if preparation is None else self._made(preparation)

    def with_keywords(self, keywords: Mapping[str, Any]) -> ProcessorSource:
        """The same as if the files had other values under some keys, which vLLM calls ``mm_processor_kwargs``.

        An object such as ``size`` keeps the keys that are not named, if it has all that are.

        Raises:
            InvalidRequest: nothing reads a key, or its value is wrong or does not go with the encoder.
        """
        family = vision_family(self.config)
        own = () if family is None else family.keywords
        whole = {key: value for key, value in keywords.items() if key in own}
        files = Watched(_overlaid(self.files, keywords))
        videos = files[VIDEO] = Watched(_overlaid(self.files.get(VIDEO) or self.files, keywords))
        found = replace(self, config={**self.config, **whole}, files=files)
        try:
            preparation_of(found.config, files)
        except UnsupportedModel as error:
            raise InvalidRequest(f"mm_processor_kwargs: {error}", field="mm_processor_kwargs") from None
        known = (files.asked | videos.asked | {*own}) - {VIDEO}
        if unknown := next((key for key in keywords if key not in known), None):
            raise InvalidRequest(
                f"mm_processor_kwargs: {unknown[:64]!r} is not known to this model's processor, which has "
                f"{', '.join(sorted(known))}",
                field="mm_processor_kwargs",
            )
        return found

    def _made(self, preparation: Preparation) -> PillowProcessor:
        tokenize = self.tokenize
        ids = {text: tuple(tokenize(text)) for text in preparation.text.strings}
        ids |= {text: (number,) for text, number in preparation.ids}
        row_token = preparation.row_token
        if isinstance(row_token, str):
            if len(found := tokenize(row_token)) != 1:
                raise CheckpointError(f"{self.path}: the tokenizer has no token {row_token!r}, at which images stand")
            row_token = found[0]
        breaks: list[int] = []
        if preparation.joins_lines:
            for count in range(1, MOST_LINE_BREAKS + 1):
                if len(found := tokenize("\n" * count)) != 1:
                    break
                breaks += found
        frame, video = preparation.frame, preparation.video
        return PillowProcessor(
            preparation,
            ids,
            tuple(tokenize(preparation.placeholder)),
            row_token,
            tuple(breaks),
            self.limits,
            None if frame is None else Frame(tuple(tokenize(frame.start)), tuple(tokenize(frame.end)), frame.removed),
            counted=tuple(tuple(tokenize(preparation.counted.format(number))) for number in range(MOST_COUNTED))
            if preparation.counted
            else (),
            video_placeholder=() if video is None else tuple(tokenize(video.frame.placeholder)),
            first=tuple(tokenize(self.first)) if preparation.begun and self.first else (),
            page=tuple(tokenize(preparation.page)) if preparation.page else (),
        )


def _overlaid(files: Mapping[str, Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Files with other values under some keys. Of Qwen's two names of the limits of pixels, the given ones count."""
    found = {**files, **keywords}
    if isinstance(size := keywords.get("size"), Mapping):
        known = files.get("size")
        if isinstance(known, Mapping) and size.keys() <= known.keys():
            found["size"] = {**known, **size}
        for edge, other in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
            if edge in size and other not in keywords:
                found.pop(other, None)
    return found


def image_processor_of(
    folder: Path, config: Mapping[str, Any], tokenize: Tokenize, *, limits: ImageLimits | None = None
) -> PillowProcessor | None:
    """The processor of a model's folder; arguments as for `source_in`; None: the model does not see.

    Raises:
        CheckpointError: a file says what is not supported.
    """
    return source_in(folder, config, tokenize, limits=limits).processor()


def source_in(
    folder: Path, config: Mapping[str, Any], tokenize: Tokenize, *, limits: ImageLimits | None = None
) -> ProcessorSource:
    """What a model's folder says of its processor.

    Args:
        folder: holds ``preprocessor_config.json``.
        config: the content of config.json.

    Raises:
        CheckpointError: a file is none of JSON.
    """
    files = processor_in(folder) if is_native(folder) else {}
    for name in FILES:
        found = _read(folder / name)
        # Transformers 5 keeps the processors of pictures and videos inside the one of texts and both.
        video = {VIDEO: found[VIDEO]} if isinstance(found.get(VIDEO), dict) else {}
        own = found.get("image_processor") or {} if "image_processor" in found else {}
        files |= {**found, **own, **video}
    if found := _read(folder / VIDEO_FILE):
        files[VIDEO] = found
    return ProcessorSource(
        config=config,
        files=files,
        tokenize=tokenize,
        path=folder,
        first=_first_token(_read(folder / "tokenizer_config.json")),
        limits=limits or ImageLimits(),
    )


def _first_token(tokenizer: Mapping[str, Any]) -> str:
    """See ``ProcessorSource.first``."""
    for found in (tokenizer.get("bos_token"), tokenizer.get("eos_token")):
        text = found.get("content") if isinstance(found, Mapping) else found
        if isinstance(text, str) and text:
            return text
    return ""


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


def source_beside(path: Path, tokenize: Tokenize, *, mmproj: Path | None = None) -> ProcessorSource | None:
    """`source_in` for a .gguf file and its encoder's; None: it has none.

    Args:
        mmproj: the encoder's file; None: the one beside the other.
    """
    gguf = GGUFFile.open(path)
    encoder = encoder_of(gguf, hf_config(gguf), mmproj)
    if encoder is None:
        return None
    return ProcessorSource(config=encoder.whole, files=encoder.processor, tokenize=tokenize, path=path)
