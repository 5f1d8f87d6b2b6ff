"""Ovis2: each patch, or square of them, becomes shares of learned vectors, and others stand at texts around tiles."""

from __future__ import annotations

from llmjax.models.layers.mlp import GatedMLP
from llmjax.models.layers.norm import RMS, Layer
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import (
    BICUBIC,
    MAX_LAYERS,
    OPENAI_MEAN,
    OPENAI_STD,
    activation,
    head_dim,
    preparation,
    require_sides,
    square,
)
from llmjax.models.vision.preparation import Covering, Gridded, Preparation
from llmjax.models.vision.spec import (
    Merged,
    Normed,
    Projected,
    Shared,
    TablePositions,
    VisionAttention,
    VisionLayer,
    VisionSpec,
)

# What Hugging Face's Ovis2VisionConfig means by a missing key.
DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 14,
    "rms_norm_eps": 1e-5,
    "qkv_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "vocab_size": 16384,
    "hidden_stride": 1,
    "num_visual_indicator_tokens": 5,
    "tokenize_function": "softmax",
}
WHOLE = {"image_token_id": 151665, "visual_indicator_token_ids": [151666, 151667, 151668, 151669, 151670]}
# The same of Ovis2ImageProcessor.
PROCESSOR = {
    "resample": BICUBIC,
    "size": {"height": 384, "width": 384},
    "rescale_factor": 1 / 255,
    "image_mean": OPENAI_MEAN,
    "image_std": OPENAI_STD,
    "crop_to_patches": False,
    "max_patches": 12,
    "use_covering_area_grid": True,
}
# The texts at which the last vectors of the table stand, in its order.
TEXTS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
_TOWER = "vision_tower.transformer"
_LAYER, _OWN = f"{_TOWER}.encoder.layers.*", "layers.*"
TENSORS = {
    f"{_TOWER}.embeddings.patch_embedding": "patch_embed",
    f"{_TOWER}.embeddings.position_embedding.weight": "positions",
    f"{_TOWER}.embeddings.rms_norm": "norm_patches",
    f"{_TOWER}.rms_norm": "norm_after",
    f"{_LAYER}.rms_norm1": f"{_OWN}.norm1",
    f"{_LAYER}.rms_norm2": f"{_OWN}.norm2",
    **{f"{_LAYER}.attention.{part}_proj": f"{_OWN}.attn.{part}_proj" for part in "qkv"},
    f"{_LAYER}.attention.out_proj": f"{_OWN}.attn.o_proj",
    **{f"{_LAYER}.ffn.{part}_proj": f"{_OWN}.mlp.{part}_proj" for part in ("gate", "up", "down")},
    "vision_tower.head_linear": "projector.step1",
    "vision_tower.head_norm": "projector.step2",
    "visual_embeddings_table.weight": f"projector.step4.weight.TABLE{len(TEXTS)}",
}


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision, out = sight.vision, sight.text.integer("hidden_size")
    vision.require("num_channels", 3)
    vision.require("tokenize_function", "softmax")
    vision.require("num_visual_indicator_tokens", len(TEXTS))
    patch, side = square(vision, "patch_size"), vision.integer("hidden_stride")
    norm = RMS(vision.number("rms_norm_eps"))
    along, bias = square(vision, "image_size") // patch, vision.flag("qkv_bias")
    if along % side:
        raise vision.error("hidden_stride", f"does not divide {along} patches a side")
    layer = VisionLayer(
        attention=VisionAttention(
            heads=vision.integer("num_attention_heads"), head_dim=head_dim(vision), bias=bias, out_bias=bias
        ),
        feed_forward=GatedMLP(
            inner=vision.integer("intermediate_size"), activation=activation(vision), bias=vision.flag("mlp_bias")
        ),
        norm=norm,
    )
    words = vision.integer("vocab_size") - len(TEXTS)
    return VisionSpec(
        patch_values=3 * patch**2,
        size=vision.integer("hidden_size"),
        out=out,
        layers=(layer,) * vision.integer("num_hidden_layers", maximum=MAX_LAYERS),
        side=side,
        projector=(
            Merged(side),
            Projected(words, bias=False),
            Normed(Layer(1e-5)),
            Shared(),
            Projected(out, bias=False),
        ),
        table=TablePositions(rows=along, columns=along),
        norm_patches=norm,
        norm_after=norm,
        learned=len(TEXTS),
        sources=1,
        tile=along**2,
    )


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    files, along = sight.processor, square(sight.vision, "image_size")
    require_sides(files, along)
    files.require("use_covering_area_grid", True)
    ids = sight.whole.token_ids("visual_indicator_token_ids")
    if len(ids) != len(TEXTS):
        raise sight.whole.error("visual_indicator_token_ids", f"must be {len(TEXTS)} token ids")
    start, whole, column, row, end = TEXTS
    return preparation(
        files,
        layout=Covering(tile=along, most=files.integer("max_patches") if files.flag("crop_to_patches") else 1),
        patch=square(sight.vision, "patch_size"),
        side=sight.vision.integer("hidden_stride"),
        placeholder="<image>",
        row_token=sight.whole.integer("image_token_id", minimum=0),
        text=Gridded(start=start, whole=whole, column=column, row=row, end=end),
        ids=tuple(zip(TEXTS, ids, strict=True)),
        row_texts=TEXTS,
    )


FAMILIES = (VisionFamily(("Ovis2ForConditionalGeneration",), encoder, pictures, TENSORS, DEFAULTS, WHOLE, PROCESSOR),)
