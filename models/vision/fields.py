"""Parts of specs and of preparations from keys that many families share."""

from __future__ import annotations

from typing import Any

from llmjax.models.fields import Fields
from llmjax.models.layers.mlp import MLP
from llmjax.models.layers.norm import Layer
from llmjax.models.vision.preparation import Cropped, Layout, PictureText, Preparation, Surrounded
from llmjax.models.vision.spec import VisionAttention, VisionLayer

OPENAI_MEAN = [0.48145466, 0.4578275, 0.40821073]
OPENAI_STD = [0.26862954, 0.26130258, 0.27577711]
IMAGENET_MEAN = [0.485, 0.456, 0.406]
IMAGENET_STD = [0.229, 0.224, 0.225]
HALF = [0.5, 0.5, 0.5]
MAX_LAYERS = 200
BILINEAR, BICUBIC, LANCZOS = 2, 3, 1


def square(fields: Fields, key: str) -> int:
    """A number, or a list of two equal ones."""
    value = fields.get(key)
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        return Fields({key: value[0]}, name=fields.name).integer(key)
    return fields.integer(key)


def resolutions(fields: Fields, key: str, *, tile: int, names: str) -> list[tuple[int, int]]:
    """The sizes that pictures are fitted into, as a file has them: pairs of multiples of a tile's side.

    Args:
        names: what the two numbers of a pair are, for the error.

    Raises:
        UnsupportedModel: there are none, or one does not fit.
    """
    sizes = fields.get(key)
    fitting = isinstance(sizes, list) and all(
        isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) and n > 0 and n % tile == 0 for n in size)
        for size in sizes
    )
    if not fitting or not sizes:
        raise fields.error(key, f"must be a list of {names}, multiples of {tile}")
    return [(first, second) for first, second in sizes]


def require_sides(fields: Fields, along: int) -> None:
    """Refuses preprocessor_config.json if pictures do not become as large as the encoder takes them.

    Args:
        along: pixels along each side.
    """
    if dict(fields.mapping("size")) != {"height": along, "width": along}:
        raise fields.error("size", f"is not {along} by {along}, which is what the encoder takes")


def cropped(fields: Fields, *, shortest: Any, side: int) -> Cropped:
    """The layout of pictures of which a square is cut, as preprocessor_config.json has it.

    Args:
        shortest: what the file says of the shorter side before.
        side: pixels along each side of what the encoder takes.

    Raises:
        UnsupportedModel: the square is not what the encoder takes.
    """
    fields.require("do_center_crop", True)
    crop = fields.get("crop_size")
    crop = crop.get("height") if isinstance(crop, dict) else crop
    if crop != side or not isinstance(shortest, int) or shortest < side:
        raise fields.error("crop_size", f"is not {side}, which is what the encoder takes")
    return Cropped(shortest=shortest, crop=side)


def head_dim(fields: Fields, *, size: str = "hidden_size", heads: str = "num_attention_heads") -> int:
    """The size of a head where heads divide a vector."""
    whole, count = fields.integer(size), fields.integer(heads)
    if whole % count:
        raise fields.error(size, f"is not a multiple of {heads} = {count}")
    return whole // count


def siglip_layers(fields: Fields, *, count: int | None = None) -> tuple[VisionLayer, ...]:
    """The layers of SigLIP and CLIP: biases everywhere, layer norms, a plain MLP."""
    layer = VisionLayer(
        attention=VisionAttention(heads=fields.integer("num_attention_heads"), head_dim=head_dim(fields)),
        feed_forward=MLP(inner=fields.integer("intermediate_size"), activation=activation(fields)),
        norm=Layer(fields.number("layer_norm_eps")),
    )
    return (layer,) * (fields.integer("num_hidden_layers", maximum=MAX_LAYERS) if count is None else count)


def activation(fields: Fields, key: str = "hidden_act") -> str:
    """A key of ACTIVATIONS."""
    return fields.choice(key, ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "gelu_fast"))


def siglip_tensors(tower: str) -> dict[str, str]:
    """The names of the tensors of SigLIP's or CLIP's encoder.

    Args:
        tower: prefix in files, without a dot at its end.
    """
    inside = {
        "embeddings.patch_embedding": "patch_embed",
        "embeddings.position_embedding.weight": "positions",
        "encoder.layers.*.self_attn.q_proj": "layers.*.attn.q_proj",
        "encoder.layers.*.self_attn.k_proj": "layers.*.attn.k_proj",
        "encoder.layers.*.self_attn.v_proj": "layers.*.attn.v_proj",
        "encoder.layers.*.self_attn.out_proj": "layers.*.attn.o_proj",
        "encoder.layers.*.layer_norm1": "layers.*.norm1",
        "encoder.layers.*.layer_norm2": "layers.*.norm2",
        "encoder.layers.*.mlp.fc1": "layers.*.mlp.up_proj",
        "encoder.layers.*.mlp.fc2": "layers.*.mlp.down_proj",
        "post_layernorm": "norm_after",
    }
    return {f"{prefix}.{name}": own for prefix in (tower, f"{tower}.vision_model") for name, own in inside.items()}


def preparation(
    fields: Fields,
    *,
    layout: Layout,
    patch: int,
    side: int,
    placeholder: str,
    row_token: int | str,
    text: PictureText | None = None,
    **changes: Any,
) -> Preparation:
    """A preparation with the keys that all files have.

    Args:
        fields: preprocessor_config.json.

    Raises:
        UnsupportedModel: a step is switched off that all models need.
    """
    fields.require("do_resize", True)
    scaled = fields.get("do_rescale") is not False
    normalized = fields.get("do_normalize") is not False
    found: dict[str, Any] = {
        "layout": layout,
        "patch": patch,
        "side": side,
        "resample": fields.integer("resample", minimum=0, maximum=5),
        "rescale": fields.number("rescale_factor") if scaled else 1.0,
        "mean": _three(fields, "image_mean") if normalized else (0.0, 0.0, 0.0),
        "std": _three(fields, "image_std") if normalized else (1.0, 1.0, 1.0),
        "placeholder": placeholder,
        "row_token": row_token,
        "text": Surrounded() if text is None else text,
        **changes,
    }
    return Preparation(**found)


def mean_color(fields: Fields) -> tuple[int, int, int]:
    """The color of a picture's mean values, which some families fill pictures up with.

    Raises:
        UnsupportedModel: they are not three numbers from 0 to 1.
    """
    mean = _three(fields, "image_mean")
    if max(mean) > 1:
        raise fields.error("image_mean", "must be numbers from 0 to 1")
    red, green, blue = (int(each * 255) for each in mean)
    return red, green, blue


def _three(fields: Fields, key: str) -> tuple[float, ...]:
    values = fields.get(key)
    values = [values] * 3 if isinstance(values, int | float) else values
    return Fields({key: values}, name=fields.name).numbers(key, count=3, zero=key == "image_mean")
