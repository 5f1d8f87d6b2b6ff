"""Pixtral and Mistral 3: pictures of any size, rotary positions by turns, and a token at the end of each line."""

from __future__ import annotations

from typing import Any

from llmjax.models.layers.mlp import GatedMLP
from llmjax.models.layers.norm import RMS
from llmjax.models.layers.rope_scaling import rope_parameters
from llmjax.models.vision import llava
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
from llmjax.models.vision.preparation import Lined, Preparation, RoundedUp
from llmjax.models.vision.spec import Merged, Normed, Projected, Rope2D, Step, VisionAttention, VisionLayer, VisionSpec

# What Hugging Face's PixtralVisionConfig means by a missing key.
DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 1024,
    "patch_size": 16,
    "hidden_act": "gelu",
    "rope_theta": 10000.0,
}
WHOLE = {**llava.WHOLE, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
MISTRAL3 = {**WHOLE, "image_token_index": 10, "spatial_merge_size": 2, "multimodal_projector_bias": False}
# The same of PixtralImageProcessor.
PROCESSOR = {
    "resample": BICUBIC,
    "size": {"longest_edge": 1024},
    "patch_size": {"height": 16, "width": 16},
    "rescale_factor": 1 / 255,
    "image_mean": OPENAI_MEAN,
    "image_std": OPENAI_STD,
}
LAYER = "vision_tower.transformer.layers.*"
TENSORS = {
    "vision_tower.patch_conv": "patch_embed",
    "vision_tower.ln_pre": "norm_before",
    f"{LAYER}.attention_norm": "layers.*.norm1",
    f"{LAYER}.ffn_norm": "layers.*.norm2",
    **{f"{LAYER}.attention.{part}_proj": f"layers.*.attn.{part}_proj" for part in "qkvo"},
    **{f"{LAYER}.feed_forward.{part}_proj": f"layers.*.mlp.{part}_proj" for part in ("gate", "up", "down")},
    "multi_modal_projector.linear_1": "projector.step0",
    "multi_modal_projector.linear_2": "projector.step1",
}
MERGED_TENSORS = {
    **TENSORS,
    "multi_modal_projector.norm": "projector.step0",
    "multi_modal_projector.patch_merger.merging_layer": "projector.step2",
    "multi_modal_projector.linear_1": "projector.step3",
    "multi_modal_projector.linear_2": "projector.step4",
}


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    return _encoder(sight, 1, ())


def merging_encoder(sight: Sight) -> VisionSpec:
    """`encoder` for Mistral 3, which joins squares of patches value by value."""
    side, size = sight.whole.integer("spatial_merge_size"), sight.vision.integer("hidden_size")
    eps = sight.text.optional_number("rms_norm_eps") or 1e-5
    return _encoder(sight, side, (Normed(RMS(eps)), Merged(side, "channels"), Projected(size, bias=False)))


def _encoder(sight: Sight, side: int, first: tuple[Step, ...]) -> VisionSpec:
    vision, whole = sight.vision, sight.whole
    vision.require("num_channels", 3)
    if whole.get("vision_feature_layer") != -1:
        raise whole.error("vision_feature_layer", "is not supported; supported is -1")
    size, out = vision.integer("hidden_size"), sight.text.integer("hidden_size")
    per_head = vision.optional_integer("head_dim") or head_dim(vision)
    layer = VisionLayer(
        attention=VisionAttention(
            heads=vision.integer("num_attention_heads"), head_dim=per_head, bias=False, out_bias=False
        ),
        feed_forward=GatedMLP(inner=vision.integer("intermediate_size"), activation=activation(vision)),
        norm=RMS(1e-5),
    )
    fields: dict[str, Any] = {"theta": rope_parameters(vision, "full_attention").number("rope_theta")}
    return VisionSpec(
        patch_values=3 * square(vision, "patch_size") ** 2,
        size=size,
        out=out,
        layers=(layer,) * vision.integer("num_hidden_layers", maximum=MAX_LAYERS),
        side=side,
        projector=(*first, *llava.projector(whole, out)),
        patch_bias=False,
        rope=Rope2D(order="by turns", **fields),
        norm_before=RMS(1e-5),
    )


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    files, whole = sight.processor, sight.whole
    patch = square(sight.vision, "patch_size")
    side = whole.integer("spatial_merge_size") if whole.get("spatial_merge_size") is not None else 1
    size = files.get("patch_size")
    unit = size.get("height") if isinstance(size, dict) else size
    longest = files.mapping("size").get("longest_edge")
    if unit not in (patch, patch * side):
        raise files.error("patch_size", f"is neither {patch} nor {patch * side}, which the encoder takes")
    if not isinstance(longest, int) or longest < patch * side:
        raise files.error("size", "must have a longest_edge that is not less than a patch's side")
    key = "image_token_id" if whole.get("image_token_id") is not None else "image_token_index"
    return preparation(
        files,
        layout=RoundedUp(unit=patch * side, longest=longest),
        patch=patch,
        side=side,
        placeholder="[IMG]",
        row_token=whole.integer(key, minimum=0),
        text=Lined(line_end="[IMG_BREAK]", end="[IMG_END]"),
    )


FAMILIES = (
    VisionFamily(
        ("LlavaForConditionalGeneration",),
        encoder,
        pictures,
        TENSORS,
        DEFAULTS,
        WHOLE,
        PROCESSOR,
        vision_types=("pixtral",),
    ),
    VisionFamily(
        ("Mistral3ForConditionalGeneration",),
        merging_encoder,
        pictures,
        MERGED_TENSORS,
        DEFAULTS,
        MISTRAL3,
        PROCESSOR,
    ),
)
