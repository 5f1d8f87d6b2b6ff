"""Qwen2-VL, ColQwen2 and Qwen2.5-VL: pictures of any size, rotary positions on two axes, and squares of four patches
merged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmjax.models.fields import Fields
from llmjax.models.layers.mlp import MLP, GatedMLP
from llmjax.models.layers.norm import RMS, Layer, NormSpec
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import (
    BICUBIC,
    MAX_LAYERS,
    OPENAI_MEAN,
    OPENAI_STD,
    activation,
    head_dim,
    preparation,
    square,
)
from llmjax.models.vision.preparation import Preparation, Sampling, SmartResize, VideoPreparation
from llmjax.models.vision.spec import Merged, Normed, Projected, Rope2D, VisionAttention, VisionLayer, VisionSpec

# What Hugging Face's Qwen2VLVisionConfig means by a missing key.
DEFAULTS = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
# The same of Qwen2_5_VLVisionConfig.
DEFAULTS_2_5 = {
    **DEFAULTS,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "window_size": 112,
    "tokens_per_second": 4,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
PAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"
"""What ColQwen2's processor takes for a missing ``visual_prompt_prefix``."""
# The same of Qwen2VLImageProcessor.
PROCESSOR = {
    "resample": BICUBIC,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "rescale_factor": 1 / 255,
    "image_mean": OPENAI_MEAN,
    "image_std": OPENAI_STD,
}
FPS = 2.0  # of a video, as qwen-vl-utils has it
# The same of Qwen2VLVideoProcessor.
VIDEO = {
    **PROCESSOR,
    "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
    "min_frames": 4,
    "max_frames": 768,
}
MAX_FRAMES = 16  # of a patch
TENSORS = {
    "visual.patch_embed.proj": "patch_embed",
    "visual.blocks.*.norm1": "layers.*.norm1",
    "visual.blocks.*.norm2": "layers.*.norm2",
    "visual.blocks.*.attn.qkv": "layers.*.attn.qkv_proj",
    "visual.blocks.*.attn.proj": "layers.*.attn.o_proj",
    "visual.blocks.*.mlp.fc1": "layers.*.mlp.up_proj",
    "visual.blocks.*.mlp.fc2": "layers.*.mlp.down_proj",
    "visual.blocks.*.mlp.gate_proj": "layers.*.mlp.gate_proj",
    "visual.blocks.*.mlp.up_proj": "layers.*.mlp.up_proj",
    "visual.blocks.*.mlp.down_proj": "layers.*.mlp.down_proj",
    "visual.merger.ln_q": "projector.step0",
    "visual.merger.mlp.0": "projector.step2",
    "visual.merger.mlp.2": "projector.step3",
}
ROPE = Rope2D()


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision = sight.vision
    size = vision.integer("embed_dim")
    layer = VisionLayer(
        attention=VisionAttention(
            heads=vision.integer("num_heads"), head_dim=head_dim(vision, size="embed_dim", heads="num_heads")
        ),
        feed_forward=MLP(inner=size * vision.integer("mlp_ratio"), activation=activation(vision)),
        norm=Layer(1e-6),
    )
    layers = (layer,) * vision.integer("depth", maximum=MAX_LAYERS)
    return merging(vision, layers, size, Layer(1e-6), out=vision.integer("hidden_size"))


def encoder_2_5(sight: Sight) -> VisionSpec:
    """`encoder` for Qwen2.5-VL, most of whose layers look at windows."""
    vision = sight.vision
    full = vision.indices("fullatt_block_indexes")
    attention = VisionAttention(heads=vision.integer("num_heads"), head_dim=head_dim(vision, heads="num_heads"))
    mlp = GatedMLP(inner=vision.integer("intermediate_size"), activation=activation(vision), bias=True)
    layers = tuple(
        VisionLayer(attention=attention, feed_forward=mlp, norm=RMS(1e-6), windowed=number not in full)
        for number in range(vision.integer("depth", maximum=MAX_LAYERS))
    )
    patch, side = square(vision, "patch_size"), vision.integer("spatial_merge_size")
    window = vision.integer("window_size") // patch // side * side
    if not window:
        raise vision.error("window_size", "is less than a square of patches")
    out = vision.integer("out_hidden_size")
    return merging(vision, layers, vision.integer("hidden_size"), RMS(1e-6), out=out, window=window)


def merging(
    vision: Fields, layers: tuple[VisionLayer, ...], size: int, norm: NormSpec, *, out: int, **changes: Any
) -> VisionSpec:
    """An encoder with rotary positions whose patches are normed, put together by squares, and projected twice.

    Args:
        size: values of a patch's vector.
        norm: what patches go through before they are merged.
        out: values of a feature row.
        changes: other fields of the spec.
    """
    patch, side = square(vision, "patch_size"), vision.integer("spatial_merge_size")
    vision.require("in_channels", 3)
    frames = vision.integer("temporal_patch_size", maximum=MAX_FRAMES)
    fields: dict[str, Any] = {
        "patch_values": 3 * frames * patch**2,
        "frames": frames,
        "size": size,
        "out": out,
        "layers": layers,
        "side": side,
        "projector": (Normed(norm), Merged(side), Projected(size * side**2, activation="gelu"), Projected(out)),
        "patch_bias": False,
        "rope": ROPE,
        **changes,
    }
    return VisionSpec(**fields)


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    return smart_pictures(sight, placeholder="<|image_pad|>", video=videos(sight))


def pages(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``; of ColQwen2, which sees no videos."""
    page = sight.processor.text("visual_prompt_prefix")
    return replace(smart_pictures(sight, placeholder="<|image_pad|>"), page=page)


def videos(sight: Sight, **changes: Any) -> VideoPreparation:
    """What is done to videos, which are sampled as qwen-vl-utils samples them where files do not say it.

    Args:
        changes: fields of VideoPreparation that are not as for Qwen2-VL.
    """
    files = sight.video
    pace = sight.vision.get("tokens_per_second")
    return VideoPreparation(
        **{
            "frame": smart_frames(files, sight, placeholder="<|video_pad|>", token="video_token_id"),
            "frames": sight.vision.integer("temporal_patch_size", maximum=MAX_FRAMES),
            "together": False,
            "sampling": Sampling(
                order="steps",
                fps=files.optional_number("fps") or FPS,
                least=files.integer("min_frames"),
                most=files.integer("max_frames"),
            ),
            "pace": None if pace is None else sight.vision.number("tokens_per_second"),
            **changes,
        }
    )


def smart_pictures(
    sight: Sight,
    *,
    placeholder: str,
    video: VideoPreparation | None = None,
    frames: int = 1,
    grows: bool = False,
) -> Preparation:
    """What is done to pictures whose sides become multiples of a square's, within limits of pixels.

    Args:
        frames, grows: see ``SmartResize``.
    """
    found = smart_frames(
        sight.processor, sight, placeholder=placeholder, token="image_token_id", frames=frames, grows=grows
    )
    return replace(found, video=video)


def smart_frames(
    files: Fields, sight: Sight, *, placeholder: str, token: str, frames: int = 1, grows: bool = False
) -> Preparation:
    """The same of pictures or of frames.

    Args:
        files: the processor's keys.
        token: the key of the token at which rows stand.
    """
    vision = sight.vision
    patch, side = square(vision, "patch_size"), vision.integer("spatial_merge_size")
    size = Fields(files.mapping("size"), files.defaults["size"], name=f"{files.name}: size")
    least = files if files.get("min_pixels") is not None else size
    most = files if files.get("max_pixels") is not None else size
    layout = SmartResize(
        unit=patch * side,
        min_pixels=least.integer("min_pixels" if least is files else "shortest_edge"),
        max_pixels=most.integer("max_pixels" if most is files else "longest_edge"),
        frames=frames,
        grows=grows,
    )
    files.require("patch_size", patch)
    files.require("merge_size", side)
    row_token = sight.whole.integer(token, minimum=0)
    return preparation(files, layout=layout, patch=patch, side=side, placeholder=placeholder, row_token=row_token)


FAMILIES = (
    VisionFamily(
        ("Qwen2VLForConditionalGeneration",),
        encoder,
        pictures,
        TENSORS,
        DEFAULTS,
        {"image_token_id": 151655, "video_token_id": 151656},
        PROCESSOR,
        VIDEO,
    ),
    VisionFamily(
        ("ColQwen2ForRetrieval",),
        encoder,
        pages,
        TENSORS,
        DEFAULTS,
        {"image_token_id": 151655},
        {**PROCESSOR, "visual_prompt_prefix": PAGE},
    ),
    VisionFamily(
        ("Qwen2_5_VLForConditionalGeneration",),
        encoder_2_5,
        pictures,
        TENSORS,
        DEFAULTS_2_5,
        {"image_token_id": 151655, "video_token_id": 151656},
        PROCESSOR,
        VIDEO,
    ),
)
