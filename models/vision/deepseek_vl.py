"""DeepSeek-VL and Janus, as far as it sees: SigLIP on the picture made square, and two matrices."""

from __future__ import annotations

from llmjax.models.layers.mlp import MLP
from llmjax.models.layers.norm import Layer
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import (
    BICUBIC,
    HALF,
    MAX_LAYERS,
    activation,
    head_dim,
    mean_color,
    preparation,
    require_sides,
    siglip_layers,
    siglip_tensors,
    square,
)
from llmjax.models.vision.gemma3 import SIGLIP
from llmjax.models.vision.preparation import Preparation, Squared, Surrounded
from llmjax.models.vision.spec import Projected, TablePositions, VisionAttention, VisionLayer, VisionSpec

# What Hugging Face's JanusVisionConfig means by a missing key.
JANUS = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 384,
    "patch_size": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "mlp_ratio": 4.0,
    "attention_bias": True,
    "projection_dim": 2048,
    "use_qk_norm": False,
    "depth": 2,
}
# The same of DeepseekVLImageProcessor and JanusImageProcessor.
PROCESSOR = {
    "resample": BICUBIC,
    "size": {"height": 384, "width": 384},
    "min_size": 14,
    "rescale_factor": 1 / 255,
    "image_mean": HALF,
    "image_std": HALF,
    "do_pad": True,
}
_TENSORS = siglip_tensors("vision_model")
TENSORS = {**_TENSORS, "aligner.linear1": "projector.step0", "aligner.linear2": "projector.step1"}
JANUS_TENSORS = {
    **_TENSORS,
    "vision_model.encoder.layers.*.self_attn.projection_layer": "layers.*.attn.o_proj",
    "aligner.fc1": "projector.step0",
    "aligner.hidden_layers.0": "projector.step1",
}


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    out = sight.text.integer("hidden_size")
    return _spec(sight, siglip_layers(sight.vision), (Projected(out, activation="gelu"), Projected(out)))


def janus_encoder(sight: Sight) -> VisionSpec:
    """`encoder` for Janus."""
    vision = sight.vision
    vision.require("use_qk_norm", False)
    vision.require("depth", 2)
    vision.require("projection_dim", sight.text.integer("hidden_size"))
    size, out, act = vision.integer("hidden_size"), vision.integer("projection_dim"), activation(vision)
    layer = VisionLayer(
        attention=VisionAttention(
            heads=vision.integer("num_attention_heads"),
            head_dim=head_dim(vision),
            bias=vision.flag("attention_bias"),
        ),
        feed_forward=MLP(inner=int(size * vision.number("mlp_ratio")), activation=act),
        norm=Layer(vision.number("layer_norm_eps")),
    )
    layers = (layer,) * vision.integer("num_hidden_layers", maximum=MAX_LAYERS)
    return _spec(sight, layers, (Projected(out, activation=act), Projected(out)))


def _spec(sight: Sight, layers: tuple[VisionLayer, ...], projector: tuple[Projected, Projected]) -> VisionSpec:
    vision = sight.vision
    vision.require("num_channels", 3)
    patch = square(vision, "patch_size")
    along = square(vision, "image_size") // patch
    return VisionSpec(
        patch_values=3 * patch**2,
        size=vision.integer("hidden_size"),
        out=projector[1].size,
        layers=layers,
        projector=projector,
        table=TablePositions(rows=along, columns=along),
        norm_after=Layer(vision.number("layer_norm_eps")),
        tile=along**2,
    )


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    return _squared(sight, Surrounded())


def janus_pictures(sight: Sight) -> Preparation:
    """`pictures` for Janus."""
    return _squared(sight, Surrounded(before="<begin_of_image>", after="<end_of_image>"))


def _squared(sight: Sight, text: Surrounded) -> Preparation:
    files, along = sight.processor, square(sight.vision, "image_size")
    files.require("do_pad", True)
    require_sides(files, along)
    return preparation(
        files,
        layout=Squared(side=along, least=files.integer("min_size"), color=mean_color(files)),
        patch=square(sight.vision, "patch_size"),
        side=1,
        placeholder="<image_placeholder>",
        row_token=sight.whole.integer("image_token_id", minimum=0),
        text=text,
    )


FAMILIES = (
    VisionFamily(
        ("DeepseekVLForConditionalGeneration",),
        encoder,
        pictures,
        TENSORS,
        SIGLIP,
        {"image_token_id": 100015},
        PROCESSOR,
    ),
    VisionFamily(
        ("JanusForConditionalGeneration",),
        janus_encoder,
        janus_pictures,
        JANUS_TENSORS,
        JANUS,
        {"image_token_id": 100581},
        PROCESSOR,
    ),
)
