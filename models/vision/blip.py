"""BLIP, as far as it sees: a transformer on a picture of one size, all of whose vectors are rows."""

from __future__ import annotations

from llmjax.models.blip import rows
from llmjax.models.fields import Fields
from llmjax.models.layers.mlp import MLP
from llmjax.models.layers.norm import Layer
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
from llmjax.models.vision.preparation import Framed, Preparation, Stretched, Surrounded
from llmjax.models.vision.spec import TablePositions, VisionAttention, VisionLayer, VisionSpec

# What Hugging Face's BlipVisionConfig means by a missing key.
DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 384,
    "patch_size": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
}
# The same of BlipTextConfig and of BlipImageProcessor.
TEXT = {"bos_token_id": 30522, "pad_token_id": 0, "encoder_hidden_size": 768}
PROCESSOR = {
    "resample": BICUBIC,
    "size": {"height": 384, "width": 384},
    "rescale_factor": 1 / 255,
    "image_mean": OPENAI_MEAN,
    "image_std": OPENAI_STD,
}
_LAYER = "vision_model.encoder.layers.*"
TENSORS = {
    "vision_model.embeddings.class_embedding": "class_embed",
    "vision_model.embeddings.patch_embedding": "patch_embed",
    "vision_model.embeddings.position_embedding": "positions",
    f"{_LAYER}.self_attn.qkv": "layers.*.attn.qkv_proj",
    f"{_LAYER}.self_attn.projection": "layers.*.attn.o_proj",
    f"{_LAYER}.layer_norm1": "layers.*.norm1",
    f"{_LAYER}.layer_norm2": "layers.*.norm2",
    f"{_LAYER}.mlp.fc1": "layers.*.mlp.up_proj",
    f"{_LAYER}.mlp.fc2": "layers.*.mlp.down_proj",
    "vision_model.post_layernorm": "norm_after",
}
BEGIN = "[DEC]"


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision = sight.vision
    size, patch = vision.integer("hidden_size"), square(vision, "patch_size")
    text = Fields(sight.text.values, TEXT, name=sight.text.name)
    text.require("encoder_hidden_size", size)
    along, norm = square(vision, "image_size") // patch, Layer(vision.number("layer_norm_eps"))
    layer = VisionLayer(
        attention=VisionAttention(heads=vision.integer("num_attention_heads"), head_dim=head_dim(vision)),
        feed_forward=MLP(inner=vision.integer("intermediate_size"), activation=activation(vision)),
        norm=norm,
    )
    return VisionSpec(
        patch_values=3 * patch**2,
        size=size,
        out=size,
        layers=(layer,) * vision.integer("num_hidden_layers", maximum=MAX_LAYERS),
        table=TablePositions(rows=along, columns=along),
        class_token=True,
        class_row="first",
        norm_after=norm,
        tile=rows(vision) - 1,
    )


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    files, along = sight.processor, square(sight.vision, "image_size")
    require_sides(files, along)
    text = Fields(sight.text.values, TEXT, name=sight.text.name)
    return preparation(
        files,
        layout=Stretched(height=along, width=along),
        patch=square(sight.vision, "patch_size"),
        side=1,
        placeholder="<image>",
        row_token=text.integer("pad_token_id", minimum=0),
        text=Surrounded(after=BEGIN),
        frame=Framed(start="[CLS]", end="[SEP]", removed=True),
        sole=True,
        needed=True,
        class_row=True,
        ids=((BEGIN, text.integer("bos_token_id", minimum=0)),),
    )


FAMILIES = (VisionFamily(("BlipForConditionalGeneration",), encoder, pictures, TENSORS, DEFAULTS, processor=PROCESSOR),)
