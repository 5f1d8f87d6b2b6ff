"""GLM-4.1V, 4.5V and 4.6V: Qwen2.5-VL without windows, learned positions mixed smoothly, squares merged by a matrix."""

from __future__ import annotations

from llmjax.models.layers.mlp import GatedMLP
from llmjax.models.layers.norm import RMS, Layer
from llmjax.models.vision import qwen2_vl
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import MAX_LAYERS, activation, head_dim, square
from llmjax.models.vision.preparation import FrameText, Preparation, Sampling, VideoPreparation
from llmjax.models.vision.spec import (
    Fed,
    Merged,
    Normed,
    Projected,
    TablePositions,
    VisionAttention,
    VisionLayer,
    VisionSpec,
)

# What Hugging Face's Glm4vVisionConfig means by a missing key.
DEFAULTS = {
    "depth": 24,
    "hidden_size": 1536,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_heads": 12,
    "in_channels": 3,
    "image_size": 336,
    "patch_size": 14,
    "rms_norm_eps": 1e-5,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 4096,
    "intermediate_size": 13696,
}
# The same of Glm4vImageProcessor.
PROCESSOR = {**qwen2_vl.PROCESSOR, "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}}
# The same of Glm4vVideoProcessor.
VIDEO = {
    **PROCESSOR,
    "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000},
    "max_duration": 300,
}
TENSORS = {
    **{name: own for name, own in qwen2_vl.TENSORS.items() if ".fc" not in name and "merger" not in name},
    "visual.embeddings.position_embedding.weight": "positions",
    "visual.post_conv_layernorm": "norm_patches",
    "visual.post_layernorm": "norm_after",
    "visual.downsample": "projector.step1",
    "visual.merger.proj": "projector.step2",
    "visual.merger.post_projection_norm": "projector.step3",
    "visual.merger.gate_proj": "projector.step4.gate_proj",
    "visual.merger.up_proj": "projector.step4.up_proj",
    "visual.merger.down_proj": "projector.step4.down_proj",
}


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision = sight.vision
    vision.require("in_channels", 3)
    patch, side, out = (
        square(vision, "patch_size"),
        vision.integer("spatial_merge_size"),
        vision.integer("out_hidden_size"),
    )
    frames = vision.integer("temporal_patch_size", maximum=qwen2_vl.MAX_FRAMES)
    norm, act, along = RMS(vision.number("rms_norm_eps")), activation(vision), square(vision, "image_size") // patch
    layer = VisionLayer(
        attention=VisionAttention(
            heads=vision.integer("num_heads"),
            head_dim=head_dim(vision, heads="num_heads"),
            bias=vision.flag("attention_bias"),
            out_bias=False,
        ),
        feed_forward=GatedMLP(inner=out, activation=act, bias=False),
        norm=norm,
    )
    return VisionSpec(
        patch_values=3 * frames * patch**2,
        frames=frames,
        size=vision.integer("hidden_size"),
        out=out,
        layers=(layer,) * vision.integer("depth", maximum=MAX_LAYERS),
        side=side,
        projector=(
            Merged(side, "channels"),
            Projected(out),
            Projected(out, bias=False),
            Normed(Layer(1e-5), activation="gelu"),
            Fed(GatedMLP(inner=vision.integer("intermediate_size"), activation=act, bias=False)),
        ),
        norm_patches=norm,
        table=TablePositions(rows=along, columns=along, between="cubic"),
        rope=qwen2_vl.ROPE,
        norm_after=norm,
    )


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    files = sight.video
    fps = files.optional_number("fps") or qwen2_vl.FPS
    most = int(files.number("max_duration") * fps)
    sampling = Sampling(order="seconds", fps=fps, least=1, most=most)
    return _pictures(sight, sampling, FrameText(before="<|begin_of_image|>", after="<|end_of_image|>{whole}"))


def pictures_4_6(sight: Sight) -> Preparation:
    """`pictures` for GLM-4.6V, whose videos' pace depends on their length."""
    frames = sight.vision.integer("temporal_patch_size", maximum=qwen2_vl.MAX_FRAMES)
    sampling = Sampling(order="length", fps=float(frames), least=1, most=640)
    text = FrameText(before="<|begin_of_image|>", after="<|end_of_image|>{seconds:.1f} seconds")
    return _pictures(sight, sampling, text)


def _pictures(sight: Sight, sampling: Sampling, text: FrameText) -> Preparation:
    files = sight.video
    frame = qwen2_vl.smart_frames(files, sight, placeholder="<|video|>", token="image_token_id", grows=True)
    video = VideoPreparation(
        frame=frame,
        frames=sight.vision.integer("temporal_patch_size", maximum=qwen2_vl.MAX_FRAMES),
        together=True,
        sampling=sampling,
        text=text,
    )
    return qwen2_vl.smart_pictures(sight, placeholder="<|image|>", frames=2, grows=True, video=video)


FAMILIES = (
    VisionFamily(
        ("Glm4vForConditionalGeneration",),
        encoder,
        pictures,
        TENSORS,
        DEFAULTS,
        {"image_token_id": 151343},
        PROCESSOR,
        VIDEO,
    ),
    VisionFamily(
        ("Glm4vMoeForConditionalGeneration",),
        encoder,
        pictures,
        TENSORS,
        DEFAULTS,
        {"image_token_id": 151363},
        PROCESSOR,
        VIDEO,
    ),
    VisionFamily(
        ("Glm46VForConditionalGeneration",),
        encoder,
        pictures_4_6,
        TENSORS,
        DEFAULTS,
        {"image_token_id": 151343},
        PROCESSOR,
        VIDEO,
    ),
)
