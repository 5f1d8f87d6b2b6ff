"""MiniCPM-V 2.6, 4 and 4.5: SigLIP on slices of a picture, each of which learned queries turn into rows."""

from __future__ import annotations

from llmjax.models.fields import Fields
from llmjax.models.layers.norm import Layer
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import (
    BICUBIC,
    HALF,
    MAX_LAYERS,
    preparation,
    siglip_layers,
    siglip_tensors,
    square,
)
from llmjax.models.vision.gemma3 import SIGLIP
from llmjax.models.vision.preparation import Preparation, Sliced, Slices, least_patches, most_patches
from llmjax.models.vision.spec import Resampling, TablePositions, VisionSpec

# What the classes that checkpoints came with mean by a missing key; their encoder's are those of SigLIP.
WHOLE = {"query_num": 64, "image_size": 448, "drop_vision_last_layer": True, "slice_mode": True}
PROCESSOR = {
    "resample": BICUBIC,
    "rescale_factor": 1 / 255,
    "max_slice_nums": 9,
    "scale_resolution": 448,
    "patch_size": 14,
    "use_image_id": False,
    "image_feature_size": 64,
    "slice_mode": True,
    "im_start": "<image>",
    "im_end": "</image>",
    "slice_start": "<slice>",
    "slice_end": "</slice>",
    "im_id_start": "<image_id>",
    "im_id_end": "</image_id>",
    "unk": "<unk>",
    **dict.fromkeys(("image_mean", "image_std"), HALF),  # by the names below in files
    "norm_mean": HALF,
    "norm_std": HALF,
}
HEAD = 128  # values of a head of the queries' attention
TENSORS = {
    **siglip_tensors("vpm"),
    **{f"resampler.{name}": f"resampler.{name}" for name in ("query", "kv_proj", "ln_q", "ln_kv", "ln_post")},
    "resampler.attn.in_proj_weight": "resampler.qkv_proj.weight",
    "resampler.attn.in_proj_bias": "resampler.qkv_proj.bias",
    "resampler.attn.out_proj": "resampler.o_proj",
    "resampler.proj": "resampler.proj.weight.T",
}


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision, whole, out = sight.vision, sight.whole, sight.text.integer("hidden_size")
    vision.require("num_channels", 3)
    if out % HEAD:
        raise sight.text.error("hidden_size", f"is not a multiple of {HEAD}, the size of a head of the resampler")
    patch, eps = square(vision, "patch_size"), vision.number("layer_norm_eps")
    cells, along = square(vision, "image_size") // patch, whole.integer("image_size") // patch
    count = vision.integer("num_hidden_layers", maximum=MAX_LAYERS)
    return VisionSpec(
        patch_values=3 * patch**2,
        size=vision.integer("hidden_size"),
        out=out,
        layers=siglip_layers(vision, count=count - whole.flag("drop_vision_last_layer")),
        table=TablePositions(rows=cells, columns=cells, between="buckets"),
        norm_after=Layer(eps),
        resampler=Resampling(
            queries=whole.integer("query_num"), heads=out // HEAD, least=least_patches(along), norm=Layer(1e-6)
        ),
        longest=most_patches(along),
    )


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    files, whole, patch = sight.processor, sight.whole, square(sight.vision, "patch_size")
    side, rows = whole.integer("image_size"), whole.integer("query_num")
    files.require("patch_size", patch)
    files.require("scale_resolution", side)
    files.require("image_feature_size", rows)
    words = {key: _word(files, key) for key, default in PROCESSOR.items() if isinstance(default, str)}
    start, end = words["im_start"], words["im_end"]
    return preparation(
        files,
        layout=Slices(side=side, most=files.integer("max_slice_nums") if files.flag("slice_mode") else 1, rows=rows),
        patch=patch,
        side=1,
        placeholder=start + end,
        row_token=words["unk"],
        text=Sliced(whole=(start, end), part=(words["slice_start"], words["slice_end"])),
        spelled=r"\(<image>\./</image>\)",
        counted=words["im_id_start"] + "{}" + words["im_id_end"] if files.flag("use_image_id") else "",
        mean=files.numbers("norm_mean", count=3),
        std=files.numbers("norm_std", count=3),
    )


def _word(files: Fields, key: str) -> str:
    if not isinstance(word := files.get(key), str):
        raise files.error(key, "must be a string")
    return word


FAMILIES = (VisionFamily(("MiniCPMV",), encoder, pictures, TENSORS, SIGLIP, WHOLE, PROCESSOR),)
