"""The declaration of a family of models that see: what its config.json says of the encoder and of pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmjax.models.fields import Fields
from llmjax.models.nested import TEXT
from llmjax.models.vision.preparation import Preparation
from llmjax.models.vision.spec import VisionSpec

VIDEO = "video_processor"
"""Under which a processor's files have what is done to videos."""


@dataclass(frozen=True)
class Sight:
    """The parts of a model's files that speak of pictures.

    Attributes:
        whole: config.json.
        vision: its ``vision_config``.
        text: its ``text_config``, or all of it in older files.
        processor: preprocessor_config.json and processor_config.json, empty where they are not read.
        video: the same for videos, from video_preprocessor_config.json or, where files have none, of pictures.
    """

    whole: Fields
    vision: Fields
    text: Fields
    processor: Fields
    video: Fields


@dataclass(frozen=True, eq=False)
class VisionFamily:
    """Architectures whose encoders are read in the same way.

    Attributes:
        architectures: what a config.json has in ``architectures``.
        encoder: makes the encoder's spec; raises UnsupportedModel if a key is wrong or not supported.
        preparation: makes what is done to pictures.
        tensors: names of modules and tensors in files, without a leading ``model.``, each with its name in the
            encoder; ``*`` stands for a number. A function of the config.json where they depend on it.
        defaults: what a missing key of ``vision_config`` means.
        whole: the same of config.json.
        processor: the same of preprocessor_config.json.
        video: the same of video_preprocessor_config.json.
        aliases: other names of keys of ``vision_config``, see ``Fields``.
        key: the key of config.json that has what is called ``vision_config`` here.
        shown_by: the key of config.json that a model which sees has; empty: each sees.
        vision_types: values of ``vision_config.model_type`` that are read so; empty: any.
        keywords: keys of config.json that say how pictures are prepared, so that a request may have its own.
        adapter: the name of the checkpoint's own adapter, with which the text model reads prompts with pictures
            (Phi-4-multimodal); empty: there is none.
    """

    architectures: tuple[str, ...]
    encoder: Callable[[Sight], VisionSpec]
    preparation: Callable[[Sight], Preparation]
    tensors: Mapping[str, str]
    defaults: Mapping[str, Any]
    whole: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    video: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shown_by: str = "vision_config"
    key: str = "vision_config"
    vision_types: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    adapter: str = ""

    def sight(self, config: Mapping[str, Any], processor: Mapping[str, Any] | None = None) -> Sight:
        """The parts of a config.json, with what missing keys mean."""
        whole = Fields(config, self.whole)
        files = processor or {}
        text = next((found for key in TEXT if (found := whole.mapping(key))), config)
        return Sight(
            whole,
            Fields(
                whole.mapping(self.key),
                self.defaults,
                name="config.json: vision_config",
                aliases=self.aliases,
            ),
            Fields(text, name="config.json: text_config"),
            Fields(files, self.processor, name="preprocessor_config.json"),
            Fields(files.get(VIDEO) or files, self.video, name="video_preprocessor_config.json"),
        )
