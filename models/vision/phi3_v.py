"""Phi-3-vision and Phi-3.5-vision: CLIP on a grid of tiles, with learned rows between lines and before the whole."""

from __future__ import annotations

from llmjax.models.fields import Fields
from llmjax.models.layers.norm import Layer
from llmjax.models.vision import llava
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import (
    BILINEAR,
    MAX_LAYERS,
    OPENAI_MEAN,
    OPENAI_STD,
    preparation,
    siglip_layers,
    siglip_tensors,
    square,
)
from llmjax.models.vision.preparation import FilledGrid, Preparation
from llmjax.models.vision.spec import Merged, Projected, TablePositions, VisionSpec

SIDE = 2  # patches along each side of a square that becomes one row
# What Phi3VImageProcessor means by a missing key.
PROCESSOR = {
    "resample": BILINEAR,
    "rescale_factor": 1 / 255,
    "image_mean": OPENAI_MEAN,
    "image_std": OPENAI_STD,
    "num_crops": 1,
}
# What the classes that checkpoints came with support of the ways in which they may be made.
MADE = {
    "embedding_cls": "image",
    "hd_transform_order": "sub_glb",
    "projection_cls": "mlp",
    "use_hd_transform": True,
    "with_learnable_separator": True,
}
TOWER, EMBEDDING = "vision_embed_tokens.img_processor", "vision_embed_tokens"
TENSORS = {
    **siglip_tensors(TOWER),
    f"{TOWER}.vision_model.embeddings.class_embedding": "class_embed",
    f"{TOWER}.vision_model.pre_layrnorm": "norm_before",
    f"{EMBEDDING}.sub_GN": "learned.0",
    f"{EMBEDDING}.glb_GN": "learned.1",
    f"{EMBEDDING}.img_projection.0": "projector.step1",
    f"{EMBEDDING}.img_projection.2": "projector.step2",
}


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision, whole, out = sight.vision, sight.whole, sight.text.integer("hidden_size")
    Fields(whole.mapping("img_processor"), name="config.json: img_processor").require("name", "clip_vision_model")
    layer = Fields(whole.mapping("embd_layer"), MADE, name="config.json: embd_layer")
    for key, value in MADE.items():
        layer.require(key, value)
    vision.require("num_channels", 3)
    patch, size = square(vision, "patch_size"), vision.integer("hidden_size")
    along = square(vision, "image_size") // patch
    if along % SIDE:
        raise vision.error("image_size", f"is not a multiple of {SIDE * patch}")
    return VisionSpec(
        patch_values=3 * patch**2,
        size=size,
        out=out,
        layers=siglip_layers(vision, count=vision.integer("num_hidden_layers", maximum=MAX_LAYERS) - 1),
        side=SIDE,
        projector=(Merged(SIDE), Projected(out, activation="gelu"), Projected(out)),
        patch_bias=False,
        table=TablePositions(rows=along, columns=along),
        class_token=True,
        norm_before=Layer(vision.number("layer_norm_eps")),
        learned=2,
        sources=1,
        arranged=1,
        tile=along**2,
    )


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    files = sight.processor
    return preparation(
        files,
        layout=FilledGrid(tile=square(sight.vision, "image_size"), most=files.integer("num_crops", maximum=100)),
        patch=square(sight.vision, "patch_size"),
        side=SIDE,
        placeholder="<|image|>",
        row_token="<|image|>",
        spelled=r"<\|image_\d+\|>",
    )


FAMILIES = (
    VisionFamily(
        ("Phi3VForCausalLM",),
        encoder,
        pictures,
        TENSORS,
        llava.CLIP,
        processor=PROCESSOR,
        shown_by="img_processor",
    ),
)
