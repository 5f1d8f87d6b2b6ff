"""Gemma 3: SigLIP on pictures of one size, whose squares of patches are averaged; a picture's tokens see each other."""

from __future__ import annotations

from llmjax.models.layers.norm import RMS, Layer
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import (
    BILINEAR,
    HALF,
    preparation,
    require_sides,
    siglip_layers,
    siglip_tensors,
    square,
)
from llmjax.models.vision.preparation import Layout, PanAndScan, Preparation, Scanned, Stretched
from llmjax.models.vision.spec import Merged, Normed, Projected, TablePositions, VisionSpec

# What Hugging Face's SiglipVisionConfig means by a missing key.
SIGLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
# The same of Gemma3ImageProcessor.
PROCESSOR = {
    "resample": BILINEAR,
    "size": {"height": 896, "width": 896},
    "rescale_factor": 1 / 255,
    "image_mean": HALF,
    "image_std": HALF,
    "do_pan_and_scan": False,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
MOST_CROPS = 16
TENSORS = {
    **siglip_tensors("vision_tower"),
    "multi_modal_projector.mm_soft_emb_norm": "projector.step1",
    "multi_modal_projector.mm_input_projection_weight": "projector.step2.weight.T",
}


def side_of(sight: Sight) -> int:
    """Patches along each side of a square that becomes one row."""
    along, rows = square(sight.vision, "image_size") // square(sight.vision, "patch_size"), _rows(sight)
    if rows > along or along % rows:
        raise sight.whole.error("mm_tokens_per_image", f"does not divide {along} patches a side")
    return along // rows


def _rows(sight: Sight) -> int:
    """Feature rows along each side of a picture."""
    whole = sight.whole
    if (along := round(whole.integer("mm_tokens_per_image") ** 0.5)) ** 2 != whole.integer("mm_tokens_per_image"):
        raise whole.error("mm_tokens_per_image", "is not a square")
    return along


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision, side = sight.vision, side_of(sight)
    vision.require("num_channels", 3)
    patch, size = square(vision, "patch_size"), vision.integer("hidden_size")
    along = square(vision, "image_size") // patch
    out, eps = sight.text.integer("hidden_size"), vision.number("layer_norm_eps")
    return VisionSpec(
        patch_values=3 * patch**2,
        size=size,
        out=out,
        layers=siglip_layers(vision),
        side=side,
        projector=(Merged(side, "mean"), Normed(RMS(eps, plus_one=True)), Projected(out, bias=False)),
        table=TablePositions(rows=along, columns=along),
        norm_after=Layer(eps),
        tile=along**2,
        bidirectional=True,
    )


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    files, patch = sight.processor, square(sight.vision, "patch_size")
    along = square(sight.vision, "image_size")
    require_sides(files, along)
    layout: Layout = Stretched(height=along, width=along)
    # Published files have null for what the processor decides by itself.
    said = files.without_nulls()
    if said.flag("do_pan_and_scan"):
        layout = PanAndScan(
            tile=along,
            least=said.integer("pan_and_scan_min_crop_size"),
            most=said.integer("pan_and_scan_max_num_crops", maximum=MOST_CROPS),
            ratio=said.number("pan_and_scan_min_ratio_to_activate"),
        )
    return preparation(
        files,
        layout=layout,
        patch=patch,
        side=side_of(sight),
        placeholder="<start_of_image>",
        row_token=sight.whole.integer("image_token_index", minimum=0),
        text=Scanned(
            before="\n\n<start_of_image>",
            after="<end_of_image>\n\n",
            whole="Here is the original image ",
            scanned=" and here are some crops to help you see better ",
        ),
        joins_lines=True,
    )


FAMILIES = (
    VisionFamily(
        ("Gemma3ForConditionalGeneration",),
        encoder,
        pictures,
        TENSORS,
        SIGLIP,
        {"mm_tokens_per_image": 256, "image_token_index": 262144},
        PROCESSOR,
    ),
)
