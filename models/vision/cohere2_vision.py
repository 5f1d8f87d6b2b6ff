"""Aya Vision and Command A Vision: SigLIP on tiles with texts beside them, and squares of patches through an MLP."""

from __future__ import annotations

from dataclasses import replace

from llmjax.models.layers.norm import Layer
from llmjax.models.vision import internvl
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import (
    BICUBIC,
    OPENAI_MEAN,
    OPENAI_STD,
    preparation,
    siglip_layers,
    siglip_tensors,
    square,
)
from llmjax.models.vision.gemma3 import SIGLIP
from llmjax.models.vision.preparation import NearestGrid, Preparation, Stretched, Tiled
from llmjax.models.vision.spec import Halved, Merged, Normed, Projected, Step, TablePositions, VisionSpec

# What missing keys mean to AyaVisionConfig and Cohere2VisionConfig.
AYA = {
    "image_token_index": 255036,
    "downsample_factor": 2,
    "adapter_layer_norm_eps": 1e-6,
    "alignment_intermediate_size": None,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
COHERE2 = {"image_token_id": 255036, "downsample_factor": 2, "alignment_intermediate_size": 36864}
# The same of GotOcr2ImageProcessor, which Aya Vision uses, and Cohere2VisionImageProcessor.
AYA_PROCESSOR = internvl.PROCESSOR
PROCESSOR = {
    "resample": BICUBIC,
    "size": {"height": 512, "width": 512},
    "rescale_factor": 1 / 255,
    "image_mean": OPENAI_MEAN,
    "image_std": OPENAI_STD,
    "crop_to_patches": True,
    "min_patches": 1,
    "max_patches": 12,
}
MOST = 100  # tiles
START, END = "<|START_OF_IMG|>", "<|END_OF_IMG|>"
_TENSORS = siglip_tensors("vision_tower")
AYA_TENSORS = {
    **_TENSORS,
    "multi_modal_projector.layernorm": "projector.step1",
    "multi_modal_projector.linear_1": "projector.step2",
    "multi_modal_projector.linear_2": "projector.step4",
}
TENSORS = {
    **_TENSORS,
    "multi_modal_projector.linear_1": "projector.step1",
    "multi_modal_projector.linear_2": "projector.step3",
}


def aya_encoder(sight: Sight) -> VisionSpec:
    """`encoder` for Aya Vision."""
    whole = sight.whole
    whole.require("vision_feature_layer", -1)
    whole.require("vision_feature_select_strategy", "full")
    # Which takes the last layer's output as it is.
    return replace(_encoder(sight, (Normed(Layer(whole.number("adapter_layer_norm_eps"))),)), norm_after=None)


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    return _encoder(sight, ())


def _encoder(sight: Sight, first: tuple[Step, ...]) -> VisionSpec:
    vision, whole, out = sight.vision, sight.whole, sight.text.integer("hidden_size")
    vision.require("num_channels", 3)
    inner, side = whole.optional_integer("alignment_intermediate_size") or out, whole.integer("downsample_factor")
    patch = square(vision, "patch_size")
    along = square(vision, "image_size") // patch
    if inner % 2 or along % side:
        raise whole.error("downsample_factor", f"does not divide {along} patches a side, or 2 does not divide {inner}")
    return VisionSpec(
        patch_values=3 * patch**2,
        size=vision.integer("hidden_size"),
        out=out,
        layers=siglip_layers(vision),
        side=side,
        projector=(Merged(side), *first, Projected(inner), Halved("silu"), Projected(out)),
        table=TablePositions(rows=along, columns=along),
        norm_after=Layer(vision.number("layer_norm_eps")),
        tile=along**2,
    )


def aya_pictures(sight: Sight) -> Preparation:
    """`pictures` for Aya Vision."""
    most = sight.processor.integer("max_patches", maximum=MOST)
    text = Tiled(most=most, start=START, tile="TILE_{number}", whole="TILE_GLOBAL", after="", end=END)
    return _tiled(sight, text, placeholder="<image>", row_token="<|IMG_PATCH|>", by_scale=False)


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    most = sight.processor.integer("max_patches", maximum=MOST)
    text = Tiled(most=most, start=START, tile="", whole="", after="<|IMG_LINE_BREAK|>", end=END)
    return _tiled(sight, text, placeholder="<|IMG_PATCH|>", row_token="<|IMG_PATCH|>", by_scale=True)


def _tiled(sight: Sight, text: Tiled, *, placeholder: str, row_token: str, by_scale: bool) -> Preparation:
    files, tile = sight.processor, square(sight.vision, "image_size")
    if dict(files.mapping("size")) != {"height": tile, "width": tile}:
        raise files.error("size", f"is not {tile} by {tile}, which is what the encoder takes")
    grid = NearestGrid(tile=tile, least=files.integer("min_patches"), most=text.most, by_scale=by_scale)
    cut = files.flag("crop_to_patches") and text.most > 1
    return preparation(
        files,
        layout=grid if cut else Stretched(height=tile, width=tile),
        patch=square(sight.vision, "patch_size"),
        side=sight.whole.integer("downsample_factor"),
        placeholder=placeholder,
        row_token=row_token,
        text=text,
    )


FAMILIES = (
    VisionFamily(
        ("AyaVisionForConditionalGeneration",), aya_encoder, aya_pictures, AYA_TENSORS, SIGLIP, AYA, AYA_PROCESSOR
    ),
    VisionFamily(("Cohere2VisionForConditionalGeneration",), encoder, pictures, TENSORS, SIGLIP, COHERE2, PROCESSOR),
)
