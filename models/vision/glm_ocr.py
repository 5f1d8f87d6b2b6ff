"""GLM-OCR: GLM-4.1V without learned positions, with norms of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from llmjax.models.layers.mlp import GatedMLP
from llmjax.models.vision import glm4v
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import activation
from llmjax.models.vision.spec import Fed, VisionSpec

# What Hugging Face's GlmOcrVisionConfig means by a missing key.
DEFAULTS = {
    **glm4v.DEFAULTS,
    "hidden_size": 1024,
    "attention_bias": True,
    "num_heads": 16,
    "out_hidden_size": 1536,
    "intermediate_size": 4096,
}
TENSORS = {
    **glm4v.TENSORS,
    "visual.blocks.*.attn.q_norm": "layers.*.attn.q_norm",
    "visual.blocks.*.attn.k_norm": "layers.*.attn.k_norm",
}
WIDENED = 3  # times the size of a row, inside the last MLP: as many as there are channels


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision, spec = sight.vision, glm4v.encoder(sight)
    bias, act, layer = vision.flag("attention_bias"), activation(vision), spec.layers[0]
    layer = replace(
        layer,
        attention=replace(layer.attention, out_bias=bias, qk_norm=layer.norm),
        feed_forward=GatedMLP(inner=vision.integer("intermediate_size"), activation=act, bias=bias),
    )
    fed = Fed(GatedMLP(inner=WIDENED * spec.out, activation=act, bias=False))
    return replace(
        spec,
        layers=(layer,) * len(spec.layers),
        projector=(*spec.projector[:-1], fed),
        norm_patches=None,
        table=None,
    )


FAMILIES = (
    VisionFamily(
        ("GlmOcrForConditionalGeneration",),
        encoder,
        glm4v.pictures_4_6,
        TENSORS,
        DEFAULTS,
        {"image_token_id": 59280},
        glm4v.PROCESSOR,
        glm4v.VIDEO,
    ),
)
