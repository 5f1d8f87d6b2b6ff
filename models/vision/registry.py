"""Finds the family that reads the vision half of a config.json."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from llmjax.models.vision.family import VisionFamily
from llmjax.models.vision.preparation import Preparation
from llmjax.models.vision.spec import VisionSpec

_DECLARED = {
    "blip": "BlipForConditionalGeneration",
    "clip": "CLIPModel MetaClip2Model",
    "cohere2_vision": "AyaVisionForConditionalGeneration Cohere2VisionForConditionalGeneration",
    "deepseek_vl": "DeepseekVLForConditionalGeneration JanusForConditionalGeneration",
    "deepseek_vl2": "DeepseekVLV2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "glm4v": "Glm46VForConditionalGeneration Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration",
    "glm_ocr": "GlmOcrForConditionalGeneration",
    "idefics2": "Idefics2ForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration SmolVLMForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration InternVLChatModel",
    "kimi": "KimiVLForConditionalGeneration KimiK25ForConditionalGeneration Kimi_K25ForConditionalGeneration",
    "lighton_ocr": "LightOnOcrForConditionalGeneration LightOnOCRForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "llava": (
        "LlavaForConditionalGeneration LlavaNextForConditionalGeneration LlavaNextVideoForConditionalGeneration "
        "LlavaOnevisionForConditionalGeneration"
    ),
    "minicpmv": "MiniCPMV",
    "molmo2": "Molmo2ForConditionalGeneration",
    "moondream": "HfMoondream",
    "ovis2": "Ovis2ForConditionalGeneration",
    "paligemma": "PaliGemmaForConditionalGeneration ColPaliForRetrieval",
    "phi3_v": "Phi3VForCausalLM",
    "phi4_multimodal": "Phi4MultimodalForCausalLM Phi4MMForCausalLM",
    "pixtral": "LlavaForConditionalGeneration Mistral3ForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration ColQwen2ForRetrieval",
    "siglip": "SiglipModel",
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration "
        "Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration"
    ),
    "vipllava": "VipLlavaForConditionalGeneration",
}


def architectures() -> tuple[str, ...]:
    """All architectures that see."""
    return tuple(dict.fromkeys(name for declared in _DECLARED.values() for name in declared.split()))


def files_of(architecture: str) -> tuple[str, ...]:
    """The files that read an architecture's vision half, one for each kind of encoder that it may have."""
    return tuple(file for file, architectures in _DECLARED.items() if architecture in architectures.split())


def vision_family(config: Mapping[str, Any]) -> VisionFamily | None:
    """The family of a whole config.json; None: the model does not see, or its encoder is not supported."""
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if not isinstance(architecture, str):
        return None
    families: list[VisionFamily] = []
    for file in files_of(architecture):
        families += importlib.import_module(f"llmjax.models.vision.{file}").FAMILIES
    for family in families:
        shown = config.get(family.shown_by) if family.shown_by else {}
        if architecture not in family.architectures or not isinstance(shown, Mapping):
            continue
        if not family.vision_types or shown.get("model_type") in family.vision_types:
            return family
    return None


def vision_spec_of(config: Mapping[str, Any]) -> VisionSpec | None:
    """The encoder of a whole config.json; None: the model does not see.

    Raises:
        UnsupportedModel: a key is wrong or not supported.
    """
    family = vision_family(config)
    return None if family is None else family.encoder(family.sight(config))


def preparation_of(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Preparation | None:
    """What is done to a model's pictures; None: the model does not see.

    Args:
        config: the whole config.json.
        processor: preprocessor_config.json.

    Raises:
        UnsupportedModel: a key is wrong or not supported.
    """
    family = vision_family(config)
    return None if family is None else family.preparation(family.sight(config, processor))
