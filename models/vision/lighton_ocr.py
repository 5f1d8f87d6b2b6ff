"""LightOnOCR: Mistral 3's encoder under other names, whose rows stand without anything between lines."""

from __future__ import annotations

from dataclasses import replace

from llmjax.models.vision import pixtral
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.preparation import Preparation, Surrounded

# What Hugging Face's LightOnOcrConfig means by a missing key.
DEFAULTS = {
    **pixtral.DEFAULTS,
    "image_size": 1540,
    "patch_size": 14,
    "hidden_act": "silu",
    "head_dim": 64,
}
WHOLE = {**pixtral.MISTRAL3, "image_token_id": 151655}
_PREFIXES = {"vision_tower": "vision_encoder", "multi_modal_projector": "vision_projection"}
TENSORS = {
    f"{_PREFIXES[prefix]}.{name}": own
    for prefix, _, name, own in ((*known.partition("."), own) for known, own in pixtral.MERGED_TENSORS.items())
}


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    return replace(pixtral.pictures(sight), placeholder="<|image_pad|>", text=Surrounded())


FAMILIES = (
    VisionFamily(
        ("LightOnOcrForConditionalGeneration", "LightOnOCRForConditionalGeneration"),
        pixtral.merging_encoder,
        pictures,
        TENSORS,
        DEFAULTS,
        WHOLE,
        pixtral.PROCESSOR,
    ),
)
