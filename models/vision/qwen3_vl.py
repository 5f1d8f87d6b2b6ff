"""Qwen3-VL and Qwen3.5: Qwen2-VL with learned positions that are mixed, and rows of earlier layers (deepstack)."""

from __future__ import annotations

from dataclasses import replace

from llmjax.models.layers.mlp import MLP
from llmjax.models.layers.norm import Layer
from llmjax.models.vision import qwen2_vl
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import HALF, MAX_LAYERS, activation, head_dim
from llmjax.models.vision.preparation import FrameText, Preparation
from llmjax.models.vision.spec import (
    Merged,
    Normed,
    Projected,
    TablePositions,
    VisionAttention,
    VisionLayer,
    VisionSpec,
)

# What Hugging Face's Qwen3VLVisionConfig means by a missing key.
DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
# The same of Qwen3_5VisionConfig.
DEFAULTS_3_5 = {**DEFAULTS, "deepstack_visual_indexes": []}
PROCESSOR = {**qwen2_vl.PROCESSOR, "image_mean": HALF, "image_std": HALF}
# The same of Qwen3VLVideoProcessor.
VIDEO = {
    **qwen2_vl.VIDEO,
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
    "image_mean": HALF,
    "image_std": HALF,
}
TENSORS = {
    **{name: own for name, own in qwen2_vl.TENSORS.items() if ".mlp." not in name and "merger" not in name},
    "visual.pos_embed.weight": "positions",
    "visual.blocks.*.mlp.linear_fc1": "layers.*.mlp.up_proj",
    "visual.blocks.*.mlp.linear_fc2": "layers.*.mlp.down_proj",
    "visual.merger.norm": "projector.step0",
    "visual.merger.linear_fc1": "projector.step2",
    "visual.merger.linear_fc2": "projector.step3",
    "visual.deepstack_merger_list.*.norm": "taps.*.step1",
    "visual.deepstack_merger_list.*.linear_fc1": "taps.*.step2",
    "visual.deepstack_merger_list.*.linear_fc2": "taps.*.step3",
}
START, END = "<|vision_start|>", "<|vision_end|>"
TIMED = FrameText(before=f"<{{seconds:.1f}} seconds>{START}", after=END, middle=True)


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision = sight.vision
    size, out, side = (vision.integer(key) for key in ("hidden_size", "out_hidden_size", "spatial_merge_size"))
    layer = VisionLayer(
        attention=VisionAttention(heads=vision.integer("num_heads"), head_dim=head_dim(vision, heads="num_heads")),
        feed_forward=MLP(inner=vision.integer("intermediate_size"), activation=activation(vision)),
        norm=Layer(1e-6),
    )
    cells = vision.integer("num_position_embeddings")
    if (along := round(cells**0.5)) ** 2 != cells:
        raise vision.error("num_position_embeddings", "is not a square")
    joined = size * side**2
    return qwen2_vl.merging(
        vision,
        (layer,) * vision.integer("depth", maximum=MAX_LAYERS),
        size,
        Layer(1e-6),
        out=out,
        patch_bias=True,
        table=TablePositions(rows=along, columns=along, between="corners"),
        tapped=vision.indices("deepstack_visual_indexes"),
        tap=(Merged(side), Normed(Layer(1e-6)), Projected(joined, activation="gelu"), Projected(out)),
    )


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    placeholder = f"{START}<|video_pad|>{END}"
    frame = qwen2_vl.smart_frames(sight.video, sight, placeholder=placeholder, token="video_token_id", grows=True)
    video = qwen2_vl.videos(sight, frame=frame, together=True, text=TIMED)
    sampling = replace(video.sampling, order="ends")
    return qwen2_vl.smart_pictures(sight, placeholder="<|image_pad|>", video=replace(video, sampling=sampling))


FAMILIES = (
    VisionFamily(
        ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        encoder,
        pictures,
        TENSORS,
        DEFAULTS,
        {"image_token_id": 151655, "video_token_id": 151656},
        PROCESSOR,
        VIDEO,
    ),
    VisionFamily(
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        encoder,
        pictures,
        TENSORS,
        DEFAULTS_3_5,
        {"image_token_id": 248056, "video_token_id": 248057},
        PROCESSOR,
        VIDEO,
    ),
)
