"""DeepSeek-VL2: SigLIP on the whole picture and on tiles of the best size, with learned rows that end lines."""

from __future__ import annotations

from llmjax.models.fields import Fields
from llmjax.models.layers.mlp import MLP
from llmjax.models.layers.norm import Layer
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import BICUBIC, HALF, MAX_LAYERS, head_dim, mean_color, preparation, resolutions
from llmjax.models.vision.preparation import PaddedViews, Preparation
from llmjax.models.vision.spec import Merged, Projected, TablePositions, VisionAttention, VisionLayer, VisionSpec

# What VisionEncoderConfig, which checkpoints came with, means by a missing key.
DEFAULTS = {
    "image_size": 384,
    "patch_size": 16,
    "width": 1024,
    "layers": 24,
    "heads": 16,
    "mlp_ratio": 4,
    "class_token": False,
}
WHOLE = {"tile_tag": "2D", "global_view_pos": "head", "candidate_resolutions": [[384, 384]]}
# What MlpProjectorConfig means by a missing key.
PROJECTOR = {
    "projector_type": "downsample_mlp_gelu",
    "input_dim": 1152,
    "n_embed": 2048,
    "depth": 2,
    "mlp_ratio": 1,
    "downsample_ratio": 2,
    "token_pooling": False,
}
PROCESSOR = {
    "resample": BICUBIC,
    "rescale_factor": 1 / 255,
    "image_mean": HALF,
    "image_std": HALF,
    "do_normalize": True,
}
UNCUT_FROM = 3  # pictures of a prompt
TENSORS = {
    "vision.patch_embed.proj": "patch_embed",
    "vision.pos_embed": "positions",
    "vision.norm": "norm_after",
    "vision.blocks.*.norm1": "layers.*.norm1",
    "vision.blocks.*.norm2": "layers.*.norm2",
    "vision.blocks.*.attn.qkv": "layers.*.attn.qkv_proj",
    "vision.blocks.*.attn.proj": "layers.*.attn.o_proj",
    "vision.blocks.*.mlp.fc1": "layers.*.mlp.up_proj",
    "vision.blocks.*.mlp.fc2": "layers.*.mlp.down_proj",
    "projector.layers.0": "projector.step1",
    "projector.layers.2": "projector.step2",
    "image_newline": "learned.0",
    "view_seperator": "learned.1",
}


def projector(whole: Fields) -> Fields:
    """The object that speaks of the projector."""
    found = Fields(whole.mapping("projector_config"), PROJECTOR, name="config.json: projector_config")
    for key in ("projector_type", "depth", "mlp_ratio", "token_pooling"):
        found.require(key, PROJECTOR[key])
    return found


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision, whole, out = sight.vision, sight.whole, sight.text.integer("hidden_size")
    vision.require("class_token", False)
    whole.require("tile_tag", "2D")
    size, patch, made = vision.integer("width"), vision.integer("patch_size"), projector(whole)
    made.require("input_dim", size)
    made.require("n_embed", out)
    side, along = made.integer("downsample_ratio"), vision.integer("image_size") // patch
    layer = VisionLayer(
        attention=VisionAttention(
            heads=vision.integer("heads"), head_dim=head_dim(vision, size="width", heads="heads")
        ),
        feed_forward=MLP(inner=int(size * vision.number("mlp_ratio")), activation="gelu_pytorch_tanh"),
        norm=Layer(1e-6),
    )
    filled = -(-along // side) * side
    return VisionSpec(
        patch_values=3 * patch**2,
        size=size,
        out=out,
        layers=(layer,) * vision.integer("layers", maximum=MAX_LAYERS),
        side=side,
        projector=(Merged(side, "channels"), Projected(out, activation="gelu"), Projected(out)),
        table=TablePositions(rows=along, columns=along),
        norm_after=Layer(1e-6),
        learned=2,
        sources=1,
        tile=filled**2,
        filled_from=along if filled != along else None,
    )


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    whole, tile, patch = sight.whole, sight.vision.integer("image_size"), sight.vision.integer("patch_size")
    whole.require("global_view_pos", "head")
    if sight.processor.get("patch_size") is not None:
        sight.processor.require("patch_size", patch)
    values = dict(sight.processor.values)
    if "normalize" in values:
        values["do_normalize"] = values["normalize"]
    files = Fields(values, PROCESSOR, name=sight.processor.name)
    found = resolutions(whole, "candidate_resolutions", tile=tile, names="widths and heights")
    sizes = tuple((height, width) for width, height in found)
    return preparation(
        files,
        layout=PaddedViews(sizes=sizes, tile=tile, color=mean_color(files)),
        patch=patch,
        side=projector(whole).integer("downsample_ratio"),
        placeholder="<image>",
        row_token="<image>",
        alone=UNCUT_FROM - 1,
    )


FAMILIES = (VisionFamily(("DeepseekVLV2ForCausalLM",), encoder, pictures, TENSORS, DEFAULTS, WHOLE, PROCESSOR),)
