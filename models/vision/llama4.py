"""Llama 4: pictures cut into tiles and seen whole, rotary positions that begin at one, and squares merged by an MLP."""

from __future__ import annotations

from llmjax.models.fields import Fields
from llmjax.models.layers.mlp import MLP
from llmjax.models.layers.norm import Layer
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import BILINEAR, HALF, MAX_LAYERS, head_dim, preparation, square
from llmjax.models.vision.preparation import Canvas, Preparation, Separated
from llmjax.models.vision.spec import (
    Merged,
    Projected,
    Rope2D,
    TablePositions,
    VisionAttention,
    VisionLayer,
    VisionSpec,
)

# What Hugging Face's Llama4VisionConfig means by a missing key.
DEFAULTS = {
    "hidden_size": 768,
    "hidden_act": "gelu",
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "num_channels": 3,
    "intermediate_size": 5632,
    "vision_output_dim": 7680,
    "image_size": 448,
    "patch_size": 14,
    "pixel_shuffle_ratio": 0.5,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
    "multi_modal_projector_bias": False,
    "rope_theta": 10000.0,
    "rope_parameters": None,
}
# The same of Llama4ImageProcessor.
PROCESSOR = {
    "resample": BILINEAR,
    "size": {"height": 336, "width": 336},
    "rescale_factor": 1 / 255,
    "image_mean": HALF,
    "image_std": HALF,
    "max_patches": 16,
}
MAX_TILES = 64
_TOWER, _LAYER = "vision_model", "vision_model.model.layers.*"
TENSORS = {
    f"{_TOWER}.patch_embedding.linear": "patch_embed",
    f"{_TOWER}.class_embedding": "class_embed",
    f"{_TOWER}.positional_embedding_vlm": "positions.LAST",
    f"{_TOWER}.layernorm_pre": "norm_before",
    f"{_TOWER}.layernorm_post": "norm_after",
    **{f"{_LAYER}.self_attn.{part}_proj": f"layers.*.attn.{part}_proj" for part in "qkvo"},
    f"{_LAYER}.input_layernorm": "layers.*.norm1",
    f"{_LAYER}.post_attention_layernorm": "layers.*.norm2",
    f"{_LAYER}.mlp.fc1": "layers.*.mlp.up_proj",
    f"{_LAYER}.mlp.fc2": "layers.*.mlp.down_proj",
    f"{_TOWER}.vision_adapter.mlp.fc1": "projector.step1",
    f"{_TOWER}.vision_adapter.mlp.fc2": "projector.step2",
    "multi_modal_projector.linear_1": "projector.step3",
}


def side_of(vision: Fields) -> int:
    """Patches along each side of a square that becomes one row."""
    side = round(1 / vision.number("pixel_shuffle_ratio"))
    if (
        vision.number("pixel_shuffle_ratio") * side != 1
        or square(vision, "image_size") // square(vision, "patch_size") % side
    ):
        raise vision.error("pixel_shuffle_ratio", "does not divide a tile's patches")
    return side


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision, out = sight.vision, sight.text.integer("hidden_size")
    vision.require("num_channels", 3)
    vision.require("hidden_act", "gelu")
    vision.require("multi_modal_projector_bias", False)
    patch, size, side = square(vision, "patch_size"), vision.integer("hidden_size"), side_of(vision)
    along, norm = square(vision, "image_size") // patch, Layer(1e-5)
    vision.require("intermediate_size", size * side**2)  # the projector reads it as the size of a square
    vision.require("vision_output_dim", vision.integer("projector_output_dim"))
    rope = Fields(vision.mapping("rope_parameters"), {"rope_theta": vision.number("rope_theta")}, name=vision.name)
    layer = VisionLayer(
        attention=VisionAttention(heads=vision.integer("num_attention_heads"), head_dim=head_dim(vision)),
        feed_forward=MLP(inner=vision.integer("intermediate_size"), activation="gelu"),
        norm=norm,
    )
    return VisionSpec(
        patch_values=3 * patch**2,
        size=size,
        out=out,
        layers=(layer,) * vision.integer("num_hidden_layers", maximum=MAX_LAYERS),
        side=side,
        projector=(
            Merged(side),
            Projected(vision.integer("projector_input_dim"), bias=False, activation="gelu"),
            Projected(vision.integer("projector_output_dim"), bias=False, activation="gelu"),
            Projected(out, bias=False),
        ),
        patch_bias=False,
        table=TablePositions(rows=along, columns=along),
        class_token=True,
        rope=Rope2D(theta=rope.number("rope_theta"), pairs="adjacent", column_first=True, offset=1),
        norm_before=norm,
        norm_after=norm,
        tile=along**2,
    )


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    files, along = sight.processor, square(sight.vision, "image_size")
    files.require("resize_to_max_canvas", False)
    if {key: files.mapping("size").get(key) for key in ("height", "width")} != {"height": along, "width": along}:
        raise files.error("size", f"is not {along} by {along}, which is what the encoder takes")
    return preparation(
        files,
        layout=Canvas(tile=along, most=files.integer("max_patches", maximum=MAX_TILES)),
        patch=square(sight.vision, "patch_size"),
        side=side_of(sight.vision),
        placeholder="<|image|>",
        row_token=sight.whole.integer("image_token_index", minimum=0),
        text=Separated(
            start="<|image_start|>",
            column="<|tile_x_separator|>",
            row="<|tile_y_separator|>",
            whole="<|image|>",
            end="<|image_end|>",
        ),
        in_bf16=True,
    )


FAMILIES = (
    VisionFamily(
        ("Llama4ForConditionalGeneration",),
        encoder,
        pictures,
        TENSORS,
        DEFAULTS,
        {"image_token_index": 200092},
        PROCESSOR,
    ),
)
