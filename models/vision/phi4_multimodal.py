"""Phi-4-multimodal, as far as it sees: SigLIP on a grid of tiles, squares averaged, an adapter for such prompts."""

from __future__ import annotations

from llmjax.models.fields import Fields
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import (
    BICUBIC,
    BILINEAR,
    HALF,
    MAX_LAYERS,
    preparation,
    siglip_layers,
    siglip_tensors,
    square,
)
from llmjax.models.vision.preparation import Preparation, ShownTiles
from llmjax.models.vision.spec import Merged, Projected, TablePositions, VisionSpec

SIDE = 2  # patches along each side of a square of which there is a mean
# What Hugging Face's Phi4MultimodalVisionConfig means by a missing key; files of Microsoft's own code have none.
DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "crop_size": 448,
    "image_token_id": 200010,
    "feature_layer": -2,
}
# What Phi4MultimodalImageProcessor means by a missing key.
PROCESSOR = {
    "resample": BICUBIC,
    "rescale_factor": 1 / 255,
    "image_mean": HALF,
    "image_std": HALF,
    "dynamic_hd": 36,
}
# What Microsoft's own code supports of the ways in which models may be made.
MADE = {
    "embedding_cls": "tune_image",
    "hd_transform_order": "sub_glb",
    "image_token_compression_cls": "avg_pool_2d",
    "projection_cls": "mlp",
    "use_hd_transform": True,
    "with_learnable_separator": True,
}
EMBEDDING = "embed_tokens_extend.image_embed"
TENSORS = {
    **siglip_tensors(f"{EMBEDDING}.img_processor"),
    f"{EMBEDDING}.sub_img_feature_extensor": "learned.0",
    f"{EMBEDDING}.global_img_feature_extensor": "learned.1",
    f"{EMBEDDING}.img_projection_up": "projector.step1",
    f"{EMBEDDING}.img_projection_down": "projector.step2",
    # As Microsoft's own code calls them.
    f"{EMBEDDING}.sub_GN": "learned.0",
    f"{EMBEDDING}.glb_GN": "learned.1",
    f"{EMBEDDING}.img_projection.0": "projector.step1",
    f"{EMBEDDING}.img_projection.2": "projector.step2",
}
NUMBERED = r"<\|image_\d+\|>"
"""What stands for pictures in prompts of Microsoft's own code."""


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision, out = sight.vision, sight.text.integer("hidden_size")
    vision.require("num_channels", 3)
    patch, image, size = square(vision, "patch_size"), square(vision, "image_size"), vision.integer("hidden_size")
    vision.require("crop_size", image)
    if (along := image // patch) % SIDE:
        raise vision.error("image_size", f"is not a multiple of {SIDE * patch}")
    count, last = vision.integer("num_hidden_layers", maximum=MAX_LAYERS), vision.get("feature_layer")
    if not isinstance(last, int) or not -count <= last < 0:
        raise vision.error("feature_layer", f"must be -{count} to -1")
    return VisionSpec(
        patch_values=3 * patch**2,
        size=size,
        out=out,
        layers=siglip_layers(vision, count=count + 1 + last),
        side=SIDE,
        projector=(Merged(SIDE, "mean"), Projected(out, activation="gelu"), Projected(out)),
        table=TablePositions(rows=along, columns=along, between="buckets"),
        learned=2,
        sources=1,
        arranged=1,
        tile=along**2,
    )


def published_encoder(sight: Sight) -> VisionSpec:
    """`encoder` for files of Microsoft's own code."""
    layer = Fields(
        Fields(sight.whole.mapping("embd_layer"), name="config.json: embd_layer").mapping("image_embd_layer"),
        {**MADE, "crop_size": DEFAULTS["crop_size"]},
        name="config.json: embd_layer.image_embd_layer",
    )
    for key, value in MADE.items():
        layer.require(key, value)
    layer.require("crop_size", sight.vision.get("image_size"))
    return encoder(sight)


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    return _prepared(sight, placeholder="<|image|>")


def published_pictures(sight: Sight) -> Preparation:
    """`pictures` for files of Microsoft's own code, whose tokenizer has another name of the token."""
    return _prepared(sight, placeholder="<|endoftext10|>")


def _prepared(sight: Sight, *, placeholder: str) -> Preparation:
    files, tile, patch = sight.processor, square(sight.vision, "image_size"), square(sight.vision, "patch_size")
    files.require("resample", BICUBIC)  # of the whole picture alone
    for key, value in (("size", {"height": tile, "width": tile}), ("patch_size", patch)):
        if files.get(key) is not None:
            files.require(key, value)
    return preparation(
        files,
        layout=ShownTiles(tile=tile, most=files.integer("dynamic_hd", maximum=100)),
        patch=patch,
        side=SIDE,
        resample=BILINEAR,
        placeholder=placeholder,
        row_token=sight.vision.integer("image_token_id"),
        spelled=NUMBERED,
    )


FAMILIES = (
    VisionFamily(
        ("Phi4MultimodalForCausalLM",),
        encoder,
        pictures,
        TENSORS,
        DEFAULTS,
        processor=PROCESSOR,
        adapter="vision",
    ),
    VisionFamily(
        ("Phi4MMForCausalLM",),
        published_encoder,
        published_pictures,
        TENSORS,
        DEFAULTS,
        processor=PROCESSOR,
        shown_by="embd_layer",
        adapter="vision",
    ),
)
