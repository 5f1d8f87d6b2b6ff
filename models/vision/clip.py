"""CLIP, as far as it sees: a picture's one row is the vector of its class token, projected to where texts' are."""

from __future__ import annotations

from llmjax.models.layers.norm import Layer
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import cropped, preparation, siglip_layers, siglip_tensors, square
from llmjax.models.vision.llava import PROCESSOR
from llmjax.models.vision.preparation import Preparation
from llmjax.models.vision.spec import Projected, TablePositions, VisionSpec

# What Hugging Face's CLIPVisionConfig means by a missing key.
DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
TENSORS = {
    **siglip_tensors("vision_model"),
    "vision_model.embeddings.class_embedding": "class_embed",
    "vision_model.pre_layrnorm": "norm_before",
    "visual_projection": "projector.step0",
}


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision, out = sight.vision, sight.whole.integer("projection_dim")
    vision.require("num_channels", 3)
    patch, norm = square(vision, "patch_size"), Layer(vision.number("layer_norm_eps"))
    along = square(vision, "image_size") // patch
    return VisionSpec(
        patch_values=3 * patch**2,
        size=vision.integer("hidden_size"),
        out=out,
        layers=siglip_layers(vision),
        projector=(Projected(out, bias=False),),
        patch_bias=False,
        table=TablePositions(rows=along, columns=along),
        class_token=True,
        class_row="only",
        norm_before=norm,
        norm_after=norm,
        tile=along**2,
    )


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    files, side = sight.processor, square(sight.vision, "image_size")
    size = files.get("size")
    shortest = size.get("shortest_edge") if isinstance(size, dict) else size
    return preparation(
        files,
        layout=cropped(files, shortest=shortest, side=side),
        patch=square(sight.vision, "patch_size"),
        side=1,
        placeholder="<image>",
        row_token=0,
        single=True,
    )


FAMILIES = (
    VisionFamily(
        ("CLIPModel", "MetaClip2Model"),
        encoder,
        pictures,
        TENSORS,
        DEFAULTS,
        {"projection_dim": 512},
        {**PROCESSOR, "do_center_crop": True},
    ),
)
