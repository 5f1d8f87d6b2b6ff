"""InternVL 2.5, 3 and 3.5: tiles on the grid of the nearest aspect, and squares of patches joined."""

from __future__ import annotations

from llmjax.models.layers.mlp import MLP
from llmjax.models.layers.norm import RMS, Layer
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import (
    BICUBIC,
    IMAGENET_MEAN,
    IMAGENET_STD,
    MAX_LAYERS,
    OPENAI_MEAN,
    OPENAI_STD,
    activation,
    head_dim,
    preparation,
    square,
)
from llmjax.models.vision.preparation import NearestGrid, Preparation, Stretched, Surrounded
from llmjax.models.vision.spec import (
    Merged,
    Normed,
    Projected,
    TablePositions,
    VisionAttention,
    VisionLayer,
    VisionSpec,
)

# What Hugging Face's InternVLVisionConfig means by a missing key.
DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": [448, 448],
    "patch_size": [14, 14],
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "norm_type": "layer_norm",
    "attention_bias": False,
    "use_qk_norm": False,
    "use_absolute_position_embeddings": True,
    "use_mean_pooling": True,
}
WHOLE = {
    "image_token_id": 151667,
    "downsample_ratio": 0.5,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}
# The same of GotOcr2ImageProcessor.
PROCESSOR = {
    "resample": BICUBIC,
    "size": {"height": 384, "width": 384},
    "rescale_factor": 1 / 255,
    "image_mean": OPENAI_MEAN,
    "image_std": OPENAI_STD,
    "crop_to_patches": False,
    "min_patches": 1,
    "max_patches": 12,
}
LAYER = "vision_tower.encoder.layer.*"
TENSORS = {
    "vision_tower.embeddings.cls_token": "class_embed",
    "vision_tower.embeddings.patch_embeddings.projection": "patch_embed",
    "vision_tower.embeddings.position_embeddings": "positions",
    "vision_tower.layernorm": "norm_after",
    f"{LAYER}.layernorm_before": "layers.*.norm1",
    f"{LAYER}.layernorm_after": "layers.*.norm2",
    f"{LAYER}.lambda_1": "layers.*.scale1",
    f"{LAYER}.lambda_2": "layers.*.scale2",
    **{f"{LAYER}.attention.{part}_proj": f"layers.*.attn.{part}_proj" for part in "qkv"},
    f"{LAYER}.attention.projection_layer": "layers.*.attn.o_proj",
    f"{LAYER}.attention.q_norm": "layers.*.attn.q_norm",
    f"{LAYER}.attention.k_norm": "layers.*.attn.k_norm",
    f"{LAYER}.mlp.fc1": "layers.*.mlp.up_proj",
    f"{LAYER}.mlp.fc2": "layers.*.mlp.down_proj",
    "multi_modal_projector.layer_norm": "projector.step1",
    "multi_modal_projector.linear_1": "projector.step2",
    "multi_modal_projector.linear_2": "projector.step3",
}


PUBLISHED_DEFAULTS = {**DEFAULTS, "image_size": 448, "patch_size": 14, "norm_type": "rms_norm"}
# What InternVLChatConfig, which checkpoints came with, means by a missing key.
PUBLISHED_WHOLE = {
    **WHOLE,
    "dynamic_image_size": False,
    "use_thumbnail": False,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 6,
}
PUBLISHED_LAYER = "vision_model.encoder.layers.*"
PUBLISHED_TENSORS = {
    "vision_model.embeddings.class_embedding": "class_embed",
    "vision_model.embeddings.patch_embedding": "patch_embed",
    "vision_model.embeddings.position_embedding": "positions",
    f"{PUBLISHED_LAYER}.attn.qkv": "layers.*.attn.qkv_proj",
    f"{PUBLISHED_LAYER}.attn.proj": "layers.*.attn.o_proj",
    **{f"{PUBLISHED_LAYER}.attn.{part}_norm": f"layers.*.attn.{part}_norm" for part in "qk"},
    **{f"{PUBLISHED_LAYER}.norm{part}": f"layers.*.norm{part}" for part in (1, 2)},
    **{f"{PUBLISHED_LAYER}.ls{part}": f"layers.*.scale{part}" for part in (1, 2)},
    f"{PUBLISHED_LAYER}.mlp.fc1": "layers.*.mlp.up_proj",
    f"{PUBLISHED_LAYER}.mlp.fc2": "layers.*.mlp.down_proj",
    **{f"mlp1.{place}": f"projector.step{step}" for place, step in ((0, 1), (1, 2), (3, 3))},
}


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision, whole = sight.vision, sight.whole
    vision.require("num_channels", 3)
    vision.require("use_absolute_position_embeddings", True)
    whole.require("vision_feature_layer", -1)
    whole.require("vision_feature_select_strategy", "default")
    patch, side = square(vision, "patch_size"), side_of(sight)
    along, out, eps = square(vision, "image_size") // patch, sight.text.integer("hidden_size"), 1e-5
    kind = vision.choice("norm_type", ("layer_norm", "rms_norm"))
    norm = (RMS if kind == "rms_norm" else Layer)(vision.number("layer_norm_eps"))
    layer = VisionLayer(
        attention=VisionAttention(
            heads=vision.integer("num_attention_heads"),
            head_dim=head_dim(vision),
            bias=vision.flag("attention_bias"),
            whole_norm=RMS(vision.number("layer_norm_eps")) if vision.flag("use_qk_norm") else None,
        ),
        feed_forward=MLP(inner=vision.integer("intermediate_size"), activation=activation(vision)),
        norm=norm,
        scaled=True,
    )
    act = activation(whole, "projector_hidden_act")
    return VisionSpec(
        patch_values=3 * patch**2,
        size=vision.integer("hidden_size"),
        out=out,
        layers=(layer,) * vision.integer("num_hidden_layers", maximum=MAX_LAYERS),
        side=side,
        projector=(Merged(side), Normed(Layer(eps)), Projected(out, activation=act), Projected(out)),
        table=TablePositions(rows=along, columns=along),
        class_token=True,
        norm_after=None if vision.flag("use_mean_pooling") else Layer(vision.number("layer_norm_eps")),
        tile=along**2,
    )


def published_encoder(sight: Sight) -> VisionSpec:
    """`encoder` for checkpoints that came with code of their own, whose keys have other names."""
    sight.whole.require("ps_version", "v2")
    sight.whole.require("select_layer", -1)
    return encoder(sight)


def side_of(sight: Sight) -> int:
    """Patches along each side of a square that becomes one row."""
    side = round(1 / sight.whole.number("downsample_ratio"))
    along = square(sight.vision, "image_size") // square(sight.vision, "patch_size")
    if along % side or side * sight.whole.number("downsample_ratio") != 1:
        raise sight.whole.error("downsample_ratio", f"does not divide {along} patches a side")
    return side


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    files, tile = sight.processor, square(sight.vision, "image_size")
    if dict(files.mapping("size")) != {"height": tile, "width": tile}:
        raise files.error("size", f"is not {tile} by {tile}, which is what the encoder takes")
    most = files.integer("max_patches", maximum=100)
    cut = files.flag("crop_to_patches") and most > 1
    return preparation(
        files,
        layout=NearestGrid(tile=tile, least=files.integer("min_patches"), most=most)
        if cut
        else Stretched(height=tile, width=tile),
        patch=square(sight.vision, "patch_size"),
        side=side_of(sight),
        placeholder="<IMG_CONTEXT>",
        row_token=sight.whole.integer("image_token_id", minimum=0),
        text=Surrounded(before="<img>", after="</img>"),
    )


def published_pictures(sight: Sight) -> Preparation:
    """`pictures` for checkpoints that came with code of their own, where config.json says how pictures are cut."""
    whole, tile = sight.whole, square(sight.vision, "image_size")
    whole.require("force_image_size", tile)
    cut = NearestGrid(
        tile=tile,
        least=whole.integer("min_dynamic_patch"),
        most=whole.integer("max_dynamic_patch", maximum=100),
        overview=whole.flag("use_thumbnail"),
    )
    return preparation(
        sight.processor,
        layout=cut if whole.flag("dynamic_image_size") else Stretched(height=tile, width=tile),
        patch=square(sight.vision, "patch_size"),
        side=side_of(sight),
        placeholder="<IMG_CONTEXT>",
        row_token="<IMG_CONTEXT>",
        text=Surrounded(before="<img>", after="</img>"),
    )


FAMILIES = (
    VisionFamily(("InternVLForConditionalGeneration",), encoder, pictures, TENSORS, DEFAULTS, WHOLE, PROCESSOR),
    VisionFamily(
        ("InternVLChatModel",),
        published_encoder,
        published_pictures,
        PUBLISHED_TENSORS,
        PUBLISHED_DEFAULTS,
        PUBLISHED_WHOLE,
        {**PROCESSOR, "image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD},
        aliases={"attention_bias": ("qkv_bias",), "use_qk_norm": ("qk_normalization",)},
        keywords=("dynamic_image_size", "use_thumbnail", "min_dynamic_patch", "max_dynamic_patch"),
    ),
)
