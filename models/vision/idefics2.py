"""Idefics2: SigLIP on pictures of any aspect, maybe cut into quarters, and a perceiver that makes rows of each."""

from __future__ import annotations

from llmjax.models.fields import Fields
from llmjax.models.layers.norm import RMS, Layer
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import BILINEAR, HALF, activation, preparation, siglip_layers, siglip_tensors, square
from llmjax.models.vision.preparation import Fenced, Preparation, Quartered
from llmjax.models.vision.spec import Perceiving, TablePositions, VisionSpec

# What Hugging Face's Idefics2VisionConfig means by a missing key.
DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
WHOLE = {"image_token_id": 32001}
# The same of Idefics2PerceiverConfig.
PERCEIVER = {
    "hidden_act": "silu",
    "hidden_size": 4096,
    "rms_norm_eps": 1e-6,
    "resampler_n_latents": 64,
    "resampler_depth": 3,
    "resampler_n_heads": 16,
    "resampler_head_dim": 96,
    "num_key_value_heads": 4,
}
# The same of MistralConfig, as far as the connector depends on it.
TEXT = {"intermediate_size": 14336, "hidden_act": "silu", "rms_norm_eps": 1e-5}
# The same of Idefics2ImageProcessor.
PROCESSOR = {
    "resample": BILINEAR,
    "size": {"shortest_edge": 378, "longest_edge": 980},
    "do_image_splitting": False,
    "rescale_factor": 1 / 255,
    "image_mean": HALF,
    "image_std": HALF,
}
_LAYER, _OWN = "connector.perceiver_resampler.layers.*", "resampler.layers.*"
TENSORS = {
    **siglip_tensors("vision_model"),
    **{f"connector.modality_projection.{part}_proj": f"resampler.{part}_proj" for part in ("gate", "up", "down")},
    "connector.perceiver_resampler.latents": "resampler.query",
    "connector.perceiver_resampler.norm": "resampler.norm",
    f"{_LAYER}.input_latents_norm": f"{_OWN}.norm1",
    f"{_LAYER}.input_context_norm": f"{_OWN}.norm_kv",
    f"{_LAYER}.post_attention_layernorm": f"{_OWN}.norm2",
    **{f"{_LAYER}.self_attn.{part}_proj": f"{_OWN}.{part}_proj" for part in "qkvo"},
    **{f"{_LAYER}.mlp.{part}_proj": f"{_OWN}.mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def _perceiver(sight: Sight) -> Fields:
    return Fields(sight.whole.mapping("perceiver_config"), PERCEIVER, name="config.json: perceiver_config")


def _sides(vision: Fields) -> tuple[int, int]:
    """The fewest and the most patches along a side, in the ratio of the edges that pictures were trained with."""
    cells, trained = square(vision, "image_size") // square(vision, "patch_size"), PROCESSOR["size"]
    return max(1, cells * trained["shortest_edge"] // trained["longest_edge"]), cells  # type: ignore[index]


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision, made = sight.vision, _perceiver(sight)
    text = Fields(sight.text.values, TEXT, name=sight.text.name)
    vision.require("num_channels", 3)
    out, patch = text.integer("hidden_size"), square(vision, "patch_size")
    heads, kv_heads = made.integer("resampler_n_heads"), made.integer("num_key_value_heads")
    if heads % kv_heads:
        raise made.error("resampler_n_heads", f"is not a multiple of num_key_value_heads = {kv_heads}")
    # Where the sizes differ, those of the file are defaults, and the text model's hold: transformers' Idefics2Config.
    eps = (made if made.integer("hidden_size") == out else text).number("rms_norm_eps")
    fewest, cells = _sides(vision)
    return VisionSpec(
        patch_values=3 * patch**2,
        size=vision.integer("hidden_size"),
        out=out,
        layers=siglip_layers(vision),
        table=TablePositions(rows=cells, columns=cells, between="buckets"),
        norm_after=Layer(vision.number("layer_norm_eps")),
        resampler=Perceiving(
            queries=made.integer("resampler_n_latents"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=made.integer("resampler_head_dim"),
            depth=made.integer("resampler_depth", maximum=100),
            widened=text.integer("intermediate_size"),
            inner=4 * out,
            widened_activation=activation(text),
            activation=activation(made),
            least=fewest**2,
            norm=RMS(eps),
        ),
        longest=cells**2,
    )


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    files, vision, patch = sight.processor, sight.vision, square(sight.vision, "patch_size")
    size, (fewest, most) = files.mapping("size"), _sides(vision)
    short, long = (size.get(key) for key in ("shortest_edge", "longest_edge"))
    if not isinstance(short, int) or not isinstance(long, int):
        raise files.error("size", "must have shortest_edge and longest_edge")
    if not fewest * patch <= short <= long < (most + 1) * patch:
        raise files.error("size", f"must have edges from {fewest * patch} to {(most + 1) * patch - 1} pixels")
    return preparation(
        files,
        layout=Quartered(shortest=short, longest=long, whole_alone=not files.flag("do_image_splitting")),
        patch=patch,
        side=1,
        placeholder="<image>",
        row_token=sight.whole.integer("image_token_id", minimum=0),
        text=Fenced(fence="<fake_token_around_image>", rows=_perceiver(sight).integer("resampler_n_latents")),
        spelled=r"<image>(?=[^\s<])",
        respelled="<image> ",
    )


FAMILIES = (
    VisionFamily(("Idefics2ForConditionalGeneration",), encoder, pictures, TENSORS, DEFAULTS, WHOLE, PROCESSOR),
)
