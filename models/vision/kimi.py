"""Kimi-VL and Kimi K2.5: pictures on black, positions stretched, and rotary ones that take turns (MoonViT)."""

from __future__ import annotations

from typing import Any

from llmjax.models.fields import Fields
from llmjax.models.layers.mlp import MLP
from llmjax.models.layers.norm import Layer
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import (
    BICUBIC,
    HALF,
    MAX_LAYERS,
    OPENAI_MEAN,
    OPENAI_STD,
    head_dim,
    preparation,
    square,
)
from llmjax.models.vision.preparation import Padded, Preparation
from llmjax.models.vision.spec import (
    Merged,
    Normed,
    Projected,
    Rope2D,
    TablePositions,
    VisionAttention,
    VisionLayer,
    VisionSpec,
)

# What MoonViTConfig, and Hugging Face's Kimi_K25VisionConfig, mean by a missing key.
DEFAULTS = {
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "merge_kernel_size": [2, 2],
}
# What Kimi-VL's image processor, which checkpoints came with, means by a missing key.
PROCESSOR = {
    "resample": BICUBIC,
    "rescale_factor": 1 / 255,
    "image_mean": OPENAI_MEAN,
    "image_std": OPENAI_STD,
    "pad_input": False,
    "in_token_limit": 4096,
}
# The same of Kimi_K25ImageProcessor.
K25_PROCESSOR = {
    **PROCESSOR,
    "image_mean": HALF,
    "image_std": HALF,
    "in_patch_limit": 16384,
    "patch_limit_on_one_side": 512,
}
LONGEST = 511  # patches along a side, for Kimi-VL
EPS = 1e-5
_TOWER, _BLOCK = "vision_tower", "vision_tower.encoder.blocks.*"
_TENSORS = {
    f"{_TOWER}.patch_embed.proj": "patch_embed",
    f"{_TOWER}.patch_embed.pos_emb.weight": "positions",
    f"{_TOWER}.encoder.final_layernorm": "norm_after",
    f"{_BLOCK}.norm0": "layers.*.norm1",
    f"{_BLOCK}.norm1": "layers.*.norm2",
    f"{_BLOCK}.wqkv": "layers.*.attn.qkv_proj",
    f"{_BLOCK}.wo": "layers.*.attn.o_proj",
    f"{_BLOCK}.mlp.fc0": "layers.*.mlp.up_proj",
    f"{_BLOCK}.mlp.fc1": "layers.*.mlp.down_proj",
}
TENSORS = {
    **_TENSORS,
    "multi_modal_projector.pre_norm": "projector.step0",
    "multi_modal_projector.linear_1": "projector.step2",
    "multi_modal_projector.linear_2": "projector.step3",
}
K25_TENSORS = {
    **_TENSORS,
    "mm_projector.pre_norm": "projector.step0",
    "mm_projector.proj.0": "projector.step2",
    "mm_projector.proj.2": "projector.step3",
}


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision, out = sight.vision, sight.text.integer("hidden_size")
    patch, side, size = square(vision, "patch_size"), square(vision, "merge_kernel_size"), vision.integer("hidden_size")
    layer = VisionLayer(
        attention=VisionAttention(heads=vision.integer("num_attention_heads"), head_dim=head_dim(vision)),
        feed_forward=MLP(inner=vision.integer("intermediate_size"), activation="gelu_pytorch_tanh"),
        norm=Layer(EPS),
    )
    return VisionSpec(
        patch_values=3 * patch**2,
        size=size,
        out=out,
        layers=(layer,) * vision.integer("num_hidden_layers", maximum=MAX_LAYERS),
        side=side,
        projector=(
            Normed(Layer(EPS)),
            Merged(side),
            Projected(size * side**2, activation="gelu"),
            Projected(out),
        ),
        table=TablePositions(
            rows=vision.integer("init_pos_emb_height"), columns=vision.integer("init_pos_emb_width"), between="cubic"
        ),
        rope=Rope2D(order="alternating", pairs="adjacent", column_first=True),
        norm_after=Layer(EPS),
    )


def k25_encoder(sight: Sight) -> VisionSpec:
    """`encoder` for Kimi K2.5, whose files name more of what all of them have in common."""
    vision, size = sight.vision, sight.vision.integer("hidden_size")
    for fields, key in ((sight.whole, "projection_hidden_size"), (vision, "mm_hidden_size")):
        if fields.get(key) is not None:
            fields.require(key, size)
    for fields, key in ((sight.whole, "projection_layer_norm_eps"), (vision, "projector_ln_eps")):
        if fields.get(key) is not None:
            fields.require(key, EPS)
    return encoder(sight)


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    files = sight.processor
    files.require("pad_input", True)
    return _padded(sight, files, most=files.integer("in_token_limit"), longest=LONGEST, shrunk=False)


def k25_pictures(sight: Sight) -> Preparation:
    """`pictures` for Kimi K2.5; keys are in an object of their own in the files that checkpoints came with."""
    values, size = sight.processor.values, sight.processor.mapping("size")
    own: dict[str, Any] = {**values, **sight.processor.mapping("media_proc_cfg")}
    if "max_patches" in values:
        own["in_patch_limit"] = values["max_patches"]
    if "max_height" in size:
        own["patch_limit_on_one_side"] = size["max_height"]
    files = Fields(own, K25_PROCESSOR, name=sight.processor.name)
    if own.get("fixed_output_tokens") is not None:
        raise files.error("fixed_output_tokens", "is not supported")
    longest = files.integer("patch_limit_on_one_side")
    return _padded(sight, files, most=files.integer("in_patch_limit"), longest=longest, shrunk=True)


def _padded(sight: Sight, files: Fields, *, most: int, longest: int, shrunk: bool) -> Preparation:
    patch, side = square(sight.vision, "patch_size"), square(sight.vision, "merge_kernel_size")
    if files.get("patch_size") is not None:
        files.require("patch_size", patch)
    return preparation(
        files,
        layout=Padded(unit=patch * side, patch=patch, most=most, longest=longest, shrunk=shrunk),
        patch=patch,
        side=side,
        placeholder="<|media_pad|>",
        row_token="<|media_pad|>",
    )


FAMILIES = (
    VisionFamily(("KimiVLForConditionalGeneration",), encoder, pictures, TENSORS, DEFAULTS, {}, PROCESSOR),
    VisionFamily(
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        k25_encoder,
        k25_pictures,
        K25_TENSORS,
        DEFAULTS,
        {},
        K25_PROCESSOR,
        aliases={
            "init_pos_emb_height": ("pos_emb_height",),
            "init_pos_emb_width": ("pos_emb_width",),
            "hidden_size": ("vt_hidden_size",),
            "intermediate_size": ("vt_intermediate_size",),
            "num_attention_heads": ("vt_num_attention_heads",),
            "num_hidden_layers": ("vt_num_hidden_layers",),
        },
    ),
)
