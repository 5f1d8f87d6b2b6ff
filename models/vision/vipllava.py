"""VipLLaVA: LLaVA 1.5 with the outputs of several layers of CLIP side by side, which a norm goes over first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmjax.models.layers.norm import Layer
from llmjax.models.vision import llava
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.spec import Normed, VisionSpec

# What Hugging Face's VipLlavaConfig means by a missing key.
WHOLE: Mapping[str, Any] = {
    **llava.WHOLE,
    "vision_feature_layer": [-2, -5, -8, -11, 6],
    "projector_layernorm_eps": 1e-5,
}
TENSORS = {
    **llava.TENSORS,
    "multi_modal_projector.projector_layernorm": "projector.step0",
    "multi_modal_projector.linear_1": "projector.step1",
    "multi_modal_projector.linear_2": "projector.step2",
}


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    aliases = {"vision_feature_layer": ("vision_feature_layers",)}
    sight = replace(sight, whole=replace(sight.whole, aliases=aliases))
    spec = llava.encoder(sight)
    norm = Normed(Layer(sight.whole.number("projector_layernorm_eps")))
    return replace(spec, projector=(norm, *spec.projector))


FAMILIES = (
    VisionFamily(
        ("VipLlavaForConditionalGeneration",),
        encoder,
        llava.pictures,
        TENSORS,
        llava.CLIP,
        WHOLE,
        llava.PROCESSOR,
        vision_types=("clip_vision_model",),
    ),
)
