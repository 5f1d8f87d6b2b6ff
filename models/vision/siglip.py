"""SigLIP, as far as it sees: a picture's one row is made by a learned query's attention to its patches."""

from __future__ import annotations

from llmjax.models.layers.mlp import MLP
from llmjax.models.layers.norm import Layer
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import activation, preparation, require_sides, siglip_layers, siglip_tensors, square
from llmjax.models.vision.gemma3 import SIGLIP
from llmjax.models.vision.paligemma import PROCESSOR
from llmjax.models.vision.preparation import Preparation, Stretched
from llmjax.models.vision.spec import Probing, TablePositions, VisionSpec

_HEAD = "vision_model.head"
TENSORS = {
    **siglip_tensors("vision_model"),
    f"{_HEAD}.probe": "resampler.query",
    f"{_HEAD}.attention.in_proj_weight": "resampler.qkv_proj.weight",
    f"{_HEAD}.attention.in_proj_bias": "resampler.qkv_proj.bias",
    f"{_HEAD}.attention.out_proj": "resampler.o_proj",
    f"{_HEAD}.layernorm": "resampler.norm",
    f"{_HEAD}.mlp.fc1": "resampler.mlp.up_proj",
    f"{_HEAD}.mlp.fc2": "resampler.mlp.down_proj",
}


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision, size = sight.vision, sight.vision.integer("hidden_size")
    vision.require("num_channels", 3)
    vision.require("vision_use_head", True)
    if (sight.text.optional_integer("projection_size") or sight.text.integer("hidden_size")) != size:
        raise vision.error("hidden_size", "is not the size of texts' vectors")
    patch, norm = square(vision, "patch_size"), Layer(vision.number("layer_norm_eps"))
    along = square(vision, "image_size") // patch
    return VisionSpec(
        patch_values=3 * patch**2,
        size=size,
        out=size,
        layers=siglip_layers(vision),
        table=TablePositions(rows=along, columns=along),
        norm_after=norm,
        resampler=Probing(
            heads=vision.integer("num_attention_heads"),
            feed_forward=MLP(inner=vision.integer("intermediate_size"), activation=activation(vision)),
            norm=norm,
            least=along**2,
        ),
        tile=along**2,
    )


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    files, along = sight.processor, square(sight.vision, "image_size")
    require_sides(files, along)
    return preparation(
        files,
        layout=Stretched(height=along, width=along),
        patch=square(sight.vision, "patch_size"),
        side=1,
        placeholder="<image>",
        row_token=0,
        single=True,
    )


FAMILIES = (
    VisionFamily(
        ("SiglipModel",),
        encoder,
        pictures,
        TENSORS,
        {**SIGLIP, "vision_use_head": True},
        processor=PROCESSOR,
        vision_types=("siglip_vision_model",),
    ),
)
