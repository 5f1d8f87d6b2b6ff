"""Moondream 2, as far as it sees: SigLIP on the whole picture and on tiles that overlap, joined patch by patch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.models.fields import Fields
from llmjax.models.layers.mlp import MLP
from llmjax.models.layers.norm import Layer
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import HALF, LANCZOS, MAX_LAYERS, head_dim, preparation
from llmjax.models.vision.preparation import Overlapped, Preparation, Surrounded
from llmjax.models.vision.spec import Joined, Projected, TablePositions, VisionAttention, VisionLayer, VisionSpec

# What VisionConfig, which checkpoints came with, means by a missing key.
DEFAULTS = {
    "enc_dim": 1152,
    "enc_patch_size": 14,
    "enc_n_layers": 27,
    "enc_ff_dim": 4304,
    "enc_n_heads": 16,
    "proj_out_dim": 2048,
    "proj_inner_dim": 8192,
    "crop_size": 378,
    "in_channels": 3,
    "max_crops": 12,
    "overlap_margin": 4,
}
TEXT = {"dim": 2048, "vocab_size": 51200}
PROCESSOR = {"resample": LANCZOS, "rescale_factor": 1 / 255, "image_mean": HALF, "image_std": HALF}
MOST = 100  # tiles
_VISION = "vision.blocks.*"
TENSORS = {
    "vision.patch_emb": "patch_embed",
    "vision.pos_emb": "positions",
    f"{_VISION}.ln1": "layers.*.norm1",
    f"{_VISION}.attn.qkv": "layers.*.attn.qkv_proj",
    f"{_VISION}.attn.proj": "layers.*.attn.o_proj",
    f"{_VISION}.ln2": "layers.*.norm2",
    f"{_VISION}.mlp.fc1": "layers.*.mlp.up_proj",
    f"{_VISION}.mlp.fc2": "layers.*.mlp.down_proj",
    "vision.post_ln": "norm_after",
    "vision.proj_mlp.fc1": "projector.step1",
    "vision.proj_mlp.fc2": "projector.step2",
}


def _part(sight: Sight, name: str, defaults: Mapping[str, Any]) -> Fields:
    """An object of the one that holds all of the model's keys."""
    whole = Fields(sight.whole.mapping("config"), name="config.json: config")
    return Fields(whole.mapping(name), defaults, name=f"config.json: config.{name}")


def _layout(vision: Fields) -> Overlapped:
    tile, patch = vision.integer("crop_size"), vision.integer("enc_patch_size")
    if tile % patch:
        raise vision.error("crop_size", f"is not a multiple of enc_patch_size = {patch}")
    margin = vision.integer("overlap_margin", minimum=0)
    if 2 * margin >= tile // patch:
        raise vision.error("overlap_margin", f"leaves nothing of {tile // patch} patches a side")
    return Overlapped(tile=tile, margin=margin * patch, most=vision.integer("max_crops", maximum=MOST))


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision, text = _part(sight, "vision", DEFAULTS), _part(sight, "text", TEXT)
    vision.require("in_channels", 3)
    out, size, patch = text.integer("dim"), vision.integer("enc_dim"), vision.integer("enc_patch_size")
    vision.require("proj_out_dim", out)
    layout, norm = _layout(vision), Layer(1e-5)
    along = layout.tile // patch
    layer = VisionLayer(
        attention=VisionAttention(
            heads=vision.integer("enc_n_heads"), head_dim=head_dim(vision, size="enc_dim", heads="enc_n_heads")
        ),
        feed_forward=MLP(inner=vision.integer("enc_ff_dim"), activation="gelu_pytorch_tanh"),
        norm=norm,
    )
    inner = vision.integer("proj_inner_dim")
    return VisionSpec(
        patch_values=3 * patch**2,
        size=size,
        out=out,
        layers=(layer,) * vision.integer("enc_n_layers", maximum=MAX_LAYERS),
        projector=(Joined(2), Projected(inner, activation="gelu_pytorch_tanh"), Projected(out)),
        table=TablePositions(rows=along, columns=along),
        norm_after=norm,
        sources=layout.most_pooled(patch),
        arranged=0,
        bidirectional=True,
        whole_text=True,
        tile=along**2,
    )


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    vision, text = _part(sight, "vision", DEFAULTS), _part(sight, "text", TEXT)
    return preparation(
        sight.processor,
        layout=_layout(vision),
        patch=vision.integer("enc_patch_size"),
        side=1,
        placeholder="<image>",
        row_token=text.integer("vocab_size") - 1,
        text=Surrounded(before="<|endoftext|>"),
        sole=True,
    )


FAMILIES = (VisionFamily(("HfMoondream",), encoder, pictures, TENSORS, DEFAULTS, processor=PROCESSOR, shown_by=""),)
