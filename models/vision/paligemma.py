"""PaliGemma 1 and 2: SigLIP on pictures of one size, one matrix, and a prompt whose tokens all see each other; and
ColPali, which reads pages so."""

from __future__ import annotations

from dataclasses import replace

from llmjax.models.layers.norm import Layer
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import BICUBIC, HALF, preparation, require_sides, siglip_layers, siglip_tensors, square
from llmjax.models.vision.gemma3 import SIGLIP
from llmjax.models.vision.preparation import Framed, Preparation, Stretched
from llmjax.models.vision.spec import Projected, TablePositions, VisionSpec

# What Hugging Face's SiglipImageProcessor means by a missing key.
PROCESSOR = {
    "resample": BICUBIC,
    "size": {"height": 224, "width": 224},
    "rescale_factor": 1 / 255,
    "image_mean": HALF,
    "image_std": HALF,
}
TENSORS = {**siglip_tensors("vision_tower"), "multi_modal_projector.linear": "projector.step0"}


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision, out = sight.vision, sight.text.integer("hidden_size")
    vision.require("num_channels", 3)
    if vision.integer("projection_dim") != out:
        raise vision.error("projection_dim", f"is not {out}, which is the text model's hidden_size")
    patch = square(vision, "patch_size")
    along = square(vision, "image_size") // patch
    return VisionSpec(
        patch_values=3 * patch**2,
        size=vision.integer("hidden_size"),
        out=out,
        layers=siglip_layers(vision),
        projector=(Projected(out),),
        table=TablePositions(rows=along, columns=along),
        norm_after=Layer(vision.number("layer_norm_eps")),
        tile=along**2,
        bidirectional=True,
        whole_prompt=True,
    )


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    files, along = sight.processor, square(sight.vision, "image_size")
    require_sides(files, along)
    return preparation(
        files,
        layout=Stretched(height=along, width=along),
        patch=square(sight.vision, "patch_size"),
        side=1,
        placeholder="<image>",
        row_token=sight.whole.integer("image_token_index", minimum=0),
        frame=Framed(start="<bos>", end="\n"),
    )


def encoder_of_pages(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``; of ColPali the text model says what its tokens see, in texts as well."""
    return replace(encoder(sight), bidirectional=False, whole_prompt=False)


def pages(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``; formula of a page's prompt: transformers' ``ColPaliProcessor``."""
    prefix = sight.processor.text("visual_prompt_prefix")
    return replace(pictures(sight), frame=None, page=f"<image><bos>{prefix}\n")


FAMILIES = (
    VisionFamily(
        ("PaliGemmaForConditionalGeneration",),
        encoder,
        pictures,
        TENSORS,
        {**SIGLIP, "projection_dim": 2048},
        {"image_token_index": 256000},
        PROCESSOR,
    ),
    VisionFamily(
        ("ColPaliForRetrieval",),
        encoder_of_pages,
        pages,
        TENSORS,
        {**SIGLIP, "projection_dim": 2048},
        {"image_token_index": 256000},
        {**PROCESSOR, "visual_prompt_prefix": "Describe the image."},
    ),
)
