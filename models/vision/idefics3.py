"""Idefics3 and SmolVLM: SigLIP on tiles, each named in the prompt by row and column, and squares of patches joined."""

from __future__ import annotations

import math

from llmjax.models.layers.norm import Layer
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import HALF, LANCZOS, preparation, siglip_layers, siglip_tensors, square
from llmjax.models.vision.preparation import Numbered, Preparation, Split
from llmjax.models.vision.spec import Merged, Projected, TablePositions, VisionSpec

# What Hugging Face's Idefics3VisionConfig means by a missing key, and SmolVLMVisionConfig too.
DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
WHOLE = {"scale_factor": 2, "image_token_id": 128257}
# The same of Idefics3ImageProcessor.
PROCESSOR = {
    "resample": LANCZOS,
    "size": {"longest_edge": 4 * 364},
    "max_image_size": {"longest_edge": 364},
    "do_image_splitting": True,
    "rescale_factor": 1 / 255,
    "image_mean": HALF,
    "image_std": HALF,
}
TENSORS = {**siglip_tensors("vision_model"), "connector.modality_projection.proj": "projector.step1"}
MOST_PIXELS = 4096  # along the longer side


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision, side = sight.vision, sight.whole.integer("scale_factor")
    vision.require("num_channels", 3)
    patch = square(vision, "patch_size")
    along = square(vision, "image_size") // patch
    if along % side:
        raise sight.whole.error("scale_factor", f"does not divide {along} patches a side")
    out = sight.text.integer("hidden_size")
    return VisionSpec(
        patch_values=3 * patch**2,
        size=vision.integer("hidden_size"),
        out=out,
        layers=siglip_layers(vision),
        side=side,
        projector=(Merged(side), Projected(out, bias=False)),
        table=TablePositions(rows=along, columns=along, between="buckets"),
        norm_after=Layer(vision.number("layer_norm_eps")),
        tile=along**2,
    )


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    files = sight.processor
    tile, longest = (files.mapping(key).get("longest_edge") for key in ("max_image_size", "size"))
    if tile != square(sight.vision, "image_size"):
        raise files.error("max_image_size", "is not what the encoder takes")
    if not isinstance(longest, int) or not 0 < longest <= MOST_PIXELS:
        raise files.error("size", f"must have a longest_edge from 1 to {MOST_PIXELS}")
    return preparation(
        files,
        layout=Split(longest=longest, tile=tile, tiled=files.flag("do_image_splitting")),
        patch=square(sight.vision, "patch_size"),
        side=sight.whole.integer("scale_factor"),
        placeholder="<image>",
        row_token=sight.whole.integer("image_token_id", minimum=0),
        text=Numbered(
            most=math.ceil(longest / tile),
            start="<fake_token_around_image>",
            tile="<row_{row}_col_{column}>",
            whole="<global-img>",
        ),
    )


FAMILIES = (
    VisionFamily(
        ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        encoder,
        pictures,
        TENSORS,
        DEFAULTS,
        WHOLE,
        PROCESSOR,
    ),
)
