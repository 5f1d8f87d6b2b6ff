"""Molmo 2: SigLIP on the whole picture and on tiles that overlap, and attention that makes a row of each window."""

from __future__ import annotations

from llmjax.models.fields import Fields
from llmjax.models.layers.mlp import MLP, GatedMLP
from llmjax.models.layers.norm import Layer
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import BILINEAR, HALF, MAX_LAYERS, activation, preparation, require_sides, square
from llmjax.models.vision.preparation import Columned, FrameText, Preparation, Sampling, VideoPreparation, Windowed
from llmjax.models.vision.spec import (
    Fed,
    TablePositions,
    TokenVectors,
    VisionAttention,
    VisionLayer,
    VisionSpec,
    Windowing,
)

# What Hugging Face's Molmo2VisionConfig means by a missing key.
DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 25,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "image_size": [378, 378],
    "patch_size": 14,
    "num_channels": 3,
    "attention_bias": True,
}
ALIASES = {"image_size": ("image_default_input_size",), "patch_size": ("image_patch_size",)}
# The same of Molmo2AdapterConfig.
ADAPTER = {
    "vision_feature_layer": [24, 18],
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "attention_bias": True,
    "hidden_act": "silu",
    "intermediate_size": 18944,
    "mlp_bias": False,
}
# The same of Molmo2Config; files do not name the token at the end of a line, which follows that of a row.
WHOLE = {
    "image_start_token_id": 151936,
    "low_res_image_start_token_id": 151940,
    "frame_start_token_id": 151943,
    "frame_end_token_id": 151944,
    "image_end_token_id": 151937,
    "image_patch_id": 151938,
}
SIDE, FRAME_SIDE = 2, 3  # patches along each side of a window, of a picture and of a frame
# The same of Molmo2ImageProcessor and of Molmo2Processor.
PROCESSOR = {
    "resample": BILINEAR,
    "size": {"height": 378, "width": 378},
    "max_crops": 8,
    "overlap_margins": [4, 4],
    "pooling_size": [SIDE, SIDE],
    "rescale_factor": 1 / 255,
    "image_mean": HALF,
    "image_std": HALF,
    "image_use_col_tokens": True,
    "use_single_crop_col_tokens": None,
    "use_single_crop_start_token": True,
    "video_use_col_tokens": False,
    "use_frame_special_tokens": True,
}
# The same of Molmo2VideoProcessor.
VIDEO = {
    **{key: PROCESSOR[key] for key in ("resample", "size", "rescale_factor", "image_mean", "image_std")},
    "pooling_size": [FRAME_SIDE, FRAME_SIDE],
    "num_frames": 64,
    "max_fps": 2,
}
# The texts at which learned rows stand, in their order.
TEXTS = ("<low_res_im_start>", "<im_start>", "<im_end>", "<im_col>", "<frame_start>", "<frame_end>")
_FILED = ("vision_backbone.image_vit", "transformer.resblocks.*")
_INSIDE = {
    **{(f"self_attn.{part}_proj", f"attention.w{part}"): f"attn.{part}_proj" for part in "qkvo"},
    ("layer_norm1", "attention_norm"): "norm1",
    ("layer_norm2", "ffn_norm"): "norm2",
    ("mlp.fc1", "feed_forward.w1"): "mlp.up_proj",
    ("mlp.fc2", "feed_forward.w2"): "mlp.down_proj",
}
_PROJECTOR = {("gate_proj", "w1"): "gate_proj", ("up_proj", "w3"): "up_proj", ("down_proj", "w2"): "down_proj"}
# Names since Transformers 5, and those of files from before.
TENSORS = {
    **{
        f"{tower}.{name}": own
        for tower in ("vision_tower", _FILED[0])
        for name, own in (
            ("patch_embedding.weight", "patch_embed.weight.HWC"),
            ("patch_embedding.bias", "patch_embed.bias"),
            ("positional_embedding", "positions"),
        )
    },
    **{f"vision_tower.layers.*.{names[0]}": f"layers.*.{own}" for names, own in _INSIDE.items()},
    **{f"{'.'.join(_FILED)}.{names[1]}": f"layers.*.{own}" for names, own in _INSIDE.items()},
    **{f"multi_modal_projector.image_pooling_2d.{part}_proj": f"windowed.{part}_proj" for part in "qkvo"},
    **{f"vision_backbone.image_pooling_2d.w{part}": f"windowed.{part}_proj" for part in "qkvo"},
    **{
        f"multi_modal_projector.image_projector.{names[0]}": f"projector.step0.{own}"
        for names, own in _PROJECTOR.items()
    },
    **{f"vision_backbone.image_projector.{names[1]}": f"projector.step0.{own}" for names, own in _PROJECTOR.items()},
    "transformer.wte.new_embedding": "tokens",
}


def _adapter(sight: Sight) -> Fields:
    values, aliases = sight.whole.mapping("adapter_config"), {"vision_feature_layer": ("vit_layers",)}
    return Fields(values, ADAPTER, name="config.json: adapter_config", aliases=aliases)


def _ids(sight: Sight) -> tuple[int, ...]:
    """The tokens of `TEXTS`."""
    keys = ("low_res_image_start_token_id", "image_start_token_id", "image_end_token_id")
    frame_keys = ("frame_start_token_id", "frame_end_token_id")
    pictures, frames = ([sight.whole.integer(key, minimum=0) for key in each] for each in (keys, frame_keys))
    return (*pictures, _row_token(sight) + 1, *frames)


def _row_token(sight: Sight) -> int:
    return sight.whole.integer("image_patch_id", minimum=0)


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision, made, heads = sight.vision, _adapter(sight), sight.vision.integer("num_attention_heads")
    vision.require("num_channels", 3)
    vision.require("num_key_value_heads", heads)
    size, patch = vision.integer("hidden_size"), square(vision, "patch_size")
    along, count = square(vision, "image_size") // patch, vision.integer("num_hidden_layers", maximum=MAX_LAYERS)
    beside = made.get("vision_feature_layer")
    if (
        not isinstance(beside, list)
        or not beside
        or not all(isinstance(n, int) and -count <= n < count for n in beside)
    ):
        raise made.error("vision_feature_layer", f"must be a list of some of {count} layers")
    own_heads, kv_heads = made.integer("num_attention_heads"), made.integer("num_key_value_heads")
    if own_heads % kv_heads:
        raise made.error("num_attention_heads", f"is not a multiple of num_key_value_heads = {kv_heads}")
    beside = [number % count for number in beside]
    bias = vision.flag("attention_bias")
    layer = VisionLayer(
        attention=VisionAttention(heads=heads, head_dim=vision.integer("head_dim"), bias=bias, out_bias=bias),
        feed_forward=MLP(inner=vision.integer("intermediate_size"), activation=activation(vision)),
        norm=Layer(vision.number("layer_norm_eps")),
    )
    out = sight.text.integer("hidden_size")
    fed = GatedMLP(
        inner=made.integer("intermediate_size"),
        activation=activation(made),
        bias=made.flag("mlp_bias"),
        down_bias=False,
    )
    first = Fields(sight.text.values, {"vocab_size": 151936}, name=sight.text.name).integer("vocab_size")
    return VisionSpec(
        patch_values=3 * patch**2,
        size=size,
        out=out,
        layers=(layer,) * (max(beside) + 1),
        beside=tuple(beside),
        windowing=Windowing(
            side=SIDE,
            heads=own_heads,
            kv_heads=kv_heads,
            head_dim=made.integer("head_dim"),
            size=made.integer("hidden_size"),
            bias=made.flag("attention_bias"),
        ),
        projector=(Fed(fed, out),),
        table=TablePositions(rows=along, columns=along),
        learned=len(TEXTS),
        tokens=TokenVectors(first=first, learned=_ids(sight), added=_row_token(sight)),
        sources=max(SIDE, FRAME_SIDE) ** 2,
        bidirectional=True,
        whole_images=True,
        tile=along**2,
    )


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    files, along, patch = sight.processor, square(sight.vision, "image_size"), square(sight.vision, "patch_size")
    require_sides(files, along)
    margins = files.get("overlap_margins")
    fitting = isinstance(margins, list) and len(margins) == 2 and all(isinstance(n, int) and n >= 0 for n in margins)
    if not fitting or sum(margins) >= along // patch:
        raise files.error("overlap_margins", f"must be two numbers whose sum is less than {along // patch}")
    files.require("pooling_size", [SIDE, SIDE])
    lines = files.flag("image_use_col_tokens")
    whole_lines = lines if files.get("use_single_crop_col_tokens") is None else files.flag("use_single_crop_col_tokens")
    low, start, end, column = TEXTS[:4]
    return preparation(
        files,
        layout=Windowed(
            tile=along,
            before=margins[0] * patch,
            after=margins[1] * patch,
            most=files.integer("max_crops", maximum=100),
            side=SIDE,
        ),
        patch=patch,
        side=1,
        placeholder="<|image|>",
        row_token=_row_token(sight),
        text=Columned(
            along=-(-(along // patch) // SIDE),
            whole=low if files.flag("use_single_crop_start_token") else start,
            start=start,
            line_end=column if lines else "",
            whole_line_end=column if whole_lines else "",
            end=end,
        ),
        ids=tuple(zip(TEXTS, _ids(sight), strict=True)),
        row_texts=TEXTS,
        begun=True,
        video=videos(sight) if sight.video.get("pooling_size") == [FRAME_SIDE, FRAME_SIDE] else None,
    )


def videos(sight: Sight) -> VideoPreparation:
    """What is done to videos: each frame is a picture of one view, after its time."""
    files, along, patch = sight.video, square(sight.vision, "image_size"), square(sight.vision, "patch_size")
    require_sides(files, along)
    files.require("frame_sample_mode", "uniform_last_frame")
    own = sight.processor.flag("use_frame_special_tokens")
    start, end = ("<frame_start>", "<frame_end>") if own else ("<im_start>", "<im_end>")
    column = "<im_col>" if sight.processor.flag("video_use_col_tokens") else ""
    frame = preparation(
        files,
        layout=Windowed(tile=along, before=0, after=0, most=0, side=FRAME_SIDE),
        patch=patch,
        side=1,
        placeholder="<|video|>",
        row_token=_row_token(sight),
        text=Columned(
            along=-(-(along // patch) // FRAME_SIDE),
            whole=start,
            start="",
            line_end="",
            whole_line_end=column,
            end=end,
        ),
        row_texts=TEXTS,
    )
    return VideoPreparation(
        frame=frame,
        frames=1,
        together=False,
        sampling=Sampling(
            order="parts" if files.get("frame_sample_mode") is None else "last",
            fps=files.number("max_fps"),
            least=1,
            most=files.integer("num_frames"),
        ),
        text=FrameText(before="{seconds:.1f} ", after="", between=" "),
    )


FAMILIES = tuple(
    VisionFamily(
        ("Molmo2ForConditionalGeneration",),
        encoder,
        pictures,
        TENSORS,
        DEFAULTS,
        WHOLE,
        PROCESSOR,
        VIDEO,
        aliases=ALIASES,
        shown_by=key,
        key=key,
    )
    for key in ("vision_config", "vit_config")
)
