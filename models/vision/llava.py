"""LLaVA 1.5, NeXT and OneVision: an early layer of CLIP or SigLIP, two matrices, and learned rows that end lines."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from llmjax.models.fields import Fields
from llmjax.models.layers.norm import Layer
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import (
    BICUBIC,
    MAX_LAYERS,
    OPENAI_MEAN,
    OPENAI_STD,
    activation,
    cropped,
    mean_color,
    preparation,
    require_sides,
    resolutions,
    siglip_layers,
    siglip_tensors,
    square,
)
from llmjax.models.vision.preparation import (
    FrameText,
    Layout,
    Pinpoints,
    Pooled,
    Preparation,
    Sampling,
    Stretched,
    VideoPreparation,
)
from llmjax.models.vision.spec import Projected, Standardized, Step, TablePositions, VisionSpec

# What Hugging Face's CLIPVisionConfig means by a missing key, in a LLaVA model.
CLIP = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 336,
    "patch_size": 14,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
# The same of SiglipVisionConfig in LLaVA-OneVision.
SIGLIP = {
    **CLIP,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "image_size": 384,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
WHOLE = {
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
NEXT = {**WHOLE, "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]}
NEXT_VIDEO = {
    **NEXT,
    "image_token_index": 32001,
    "video_token_index": 32000,
    "spatial_pool_mode": "average",
    "spatial_pool_stride": 2,
}
SIZES = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
ONEVISION = {
    **WHOLE,
    "image_token_index": 151646,
    "video_token_index": 151647,
    "image_grid_pinpoints": SIZES,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "vision_aspect_ratio": "anyres_max_9",
}
# What their image processors mean by a missing key.
PROCESSOR = {
    "resample": BICUBIC,
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
    "rescale_factor": 1 / 255,
    "image_mean": OPENAI_MEAN,
    "image_std": OPENAI_STD,
}
FRAMES = {"num_frames": 32, "fps": None}  # of a video, where files do not say it: as many as vLLM takes
HALVED = 2  # patches along each side of which OneVision makes one row of a frame
PROJECTOR = {
    "multi_modal_projector.linear_1": "projector.step0",
    "multi_modal_projector.linear_2": "projector.step1",
    "image_newline": "learned.0",
}
TENSORS = {
    **siglip_tensors("vision_tower"),
    **{
        f"{tower}.{name}": own
        for tower in ("vision_tower", "vision_tower.vision_model")
        for name, own in (("embeddings.class_embedding", "class_embed"), ("pre_layrnorm", "norm_before"))
    },
    **PROJECTOR,
}


def projector(whole: Fields, out: int) -> tuple[Projected, Projected]:
    """Two matrices with an activation between them."""
    bias = whole.flag("multimodal_projector_bias")
    return Projected(out, bias, activation(whole, "projector_hidden_act")), Projected(out, bias)


def feature_layers(whole: Fields, count: int) -> tuple[int, ...]:
    """The layers whose outputs are what is projected, from 0 on; files number what goes into each, and the last output.

    Args:
        count: layers of the encoder.
    """
    given = whole.get("vision_feature_layer")
    found = list(given) if isinstance(given, list | tuple) else [given]
    if not found or not all(isinstance(number, int) and -count <= number <= count and number for number in found):
        raise whole.error("vision_feature_layer", f"must be a layer or a list of some, from -{count} to {count}, not 0")
    return tuple(number - 1 if number > 0 else count + number for number in found)


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision, whole = sight.vision, sight.whole
    vision.require("num_channels", 3)
    clip, cut = vision.get("model_type") != "siglip_vision_model", whole.get("image_grid_pinpoints") is not None
    full = whole.choice("vision_feature_select_strategy", ("default", "full")) == "full"
    if not (clip or full) or (clip and full and cut):
        raise whole.error("vision_feature_select_strategy", "is not supported for this encoder")
    seen = feature_layers(whole, vision.integer("num_hidden_layers", maximum=MAX_LAYERS))
    patch, out = square(vision, "patch_size"), sight.text.integer("hidden_size")
    along = square(vision, "image_size") // patch
    fields: dict[str, Any] = {"class_row": "first"} if clip and full else {}
    if cut:
        fields = {"learned": 1, "sources": 1 if whole.get("vision_aspect_ratio") is None else 4}
    steps: tuple[Step, ...] = projector(whole, out)
    if (factor := sight.text.optional_number("embedding_multiplier")) is not None:  # Granite's, of all embeddings
        steps, fields["arranged"] = (*steps, Standardized(factor, learned=False)), len(steps)
    return VisionSpec(
        patch_values=3 * patch**2,
        size=vision.integer("hidden_size"),
        out=out,
        layers=siglip_layers(vision, count=max(seen) + 1),
        beside=seen if len(seen) > 1 else (),
        projector=steps,
        patch_bias=not clip,
        table=TablePositions(rows=along, columns=along),
        class_token=clip,
        norm_before=Layer(vision.number("layer_norm_eps")) if clip else None,
        tile=along**2,
        **fields,
    )


def next_video_encoder(sight: Sight) -> VisionSpec:
    """`encoder` for LLaVA-NeXT-Video, where rows of frames are means of patches before they are projected."""
    spec = encoder(sight)
    sight.whole.require("spatial_pool_mode", "average")
    count = sight.whole.integer("spatial_pool_stride", maximum=math.isqrt(spec.tile or 1)) ** 2
    return replace(spec, sources=count, arranged=0, inserted=len(spec.projector))


def next_video_pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``; of videos each frame is a square from its middle."""
    files, side = sight.video, square(sight.vision, "image_size")
    size = files.get("size")
    layout = cropped(files, shortest=size.get("shortest_edge") if isinstance(size, dict) else size, side=side)
    pooled = Pooled(of=layout, mixed=False, side=sight.whole.integer("spatial_pool_stride"))
    return replace(pictures(sight), video=_video(sight, pooled, ended=False))


def onevision_pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``; of videos each frame is stretched to a tile."""
    side = square(sight.vision, "image_size")
    require_sides(sight.video, side)
    pooled = Pooled(of=Stretched(height=side, width=side), mixed=True, side=HALVED)
    return replace(pictures(sight), video=_video(sight, pooled, ended=True))


def _video(sight: Sight, layout: Pooled, *, ended: bool) -> VideoPreparation:
    files = sight.video
    fps = files.optional_number("fps")
    return VideoPreparation(
        frame=laid(sight, layout, video=True),
        frames=1,
        together=False,
        sampling=Sampling(order="parts", fps=fps, least=1, most=files.integer("num_frames")),
        text=FrameText(before="", after=""),
        ended=ended,
    )


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    files, vision = sight.processor, sight.vision
    size = files.get("size")
    shortest = size.get("shortest_edge", size.get("height")) if isinstance(size, dict) else size
    side = square(vision, "image_size")
    if sight.whole.get("image_grid_pinpoints") is None:
        files.require("do_pad", False)
        full = sight.whole.get("vision_feature_select_strategy") == "full"
        class_row = full and vision.get("model_type") != "siglip_vision_model"
        return replace(laid(sight, cropped(files, shortest=shortest, side=side)), class_row=class_row)
    if shortest != side:
        raise files.error("size", f"is not {side}, which is what the encoder takes")
    most = sight.whole.get("vision_aspect_ratio")
    square_color = mean_color(files) if most is not None and files.get("image_mean") is not None else None
    number = None if most is None else str(most).removeprefix("anyres_max_")
    if number is not None and not number.isdecimal():
        raise sight.whole.error("vision_aspect_ratio", "is not supported; supported is anyres_max_ with a number")
    return laid(
        sight,
        Pinpoints(
            sizes=tuple(resolutions(sight.whole, "image_grid_pinpoints", tile=side, names="heights and widths")),
            tile=side,
            most=None if number is None else int(number),
            padding=square_color,
        ),
    )


def laid(sight: Sight, layout: Layout, *, video: bool = False) -> Preparation:
    """The preparation of pictures, or of a video's frames, that are nothing but feature rows in a prompt."""
    whole, what = sight.whole, "video" if video else "image"
    key = f"{what}_token_id" if whole.get(f"{what}_token_id") is not None else f"{what}_token_index"
    return preparation(
        sight.video if video else sight.processor,
        layout=layout,
        patch=square(sight.vision, "patch_size"),
        side=1,
        placeholder=f"<{what}>",
        row_token=whole.integer(key, minimum=0),
    )


TOWERS = ("clip_vision_model", "siglip_vision_model")
FAMILIES = (
    VisionFamily(
        ("LlavaForConditionalGeneration",), encoder, pictures, TENSORS, CLIP, WHOLE, PROCESSOR, vision_types=TOWERS
    ),
    VisionFamily(
        ("LlavaNextForConditionalGeneration",), encoder, pictures, TENSORS, CLIP, NEXT, PROCESSOR, vision_types=TOWERS
    ),
    VisionFamily(
        ("LlavaNextVideoForConditionalGeneration",),
        next_video_encoder,
        next_video_pictures,
        TENSORS,
        CLIP,
        NEXT_VIDEO,
        PROCESSOR,
        {**PROCESSOR, **FRAMES},
        vision_types=TOWERS,
    ),
    VisionFamily(
        ("LlavaOnevisionForConditionalGeneration",),
        encoder,
        onevision_pictures,
        TENSORS,
        SIGLIP,
        ONEVISION,
        {**PROCESSOR, "size": {"height": 384, "width": 384}},
        {**PROCESSOR, **FRAMES, "size": {"height": 384, "width": 384}},
        vision_types=TOWERS,
    ),
)
