"""Gemma 4: pictures of any size within a budget of rows, whose squares of nine patches are averaged."""

from __future__ import annotations

from llmjax.models.fields import Fields
from llmjax.models.layers.mlp import GatedMLP
from llmjax.models.layers.norm import RMS
from llmjax.models.vision.family import Sight, VisionFamily
from llmjax.models.vision.fields import BICUBIC, HALF, MAX_LAYERS, activation, preparation, square
from llmjax.models.vision.preparation import Budgeted, Preparation, Surrounded
from llmjax.models.vision.spec import (
    Merged,
    Normed,
    Projected,
    Rope2D,
    Standardized,
    TablePositions,
    VisionAttention,
    VisionLayer,
    VisionSpec,
)

# What Hugging Face's Gemma4VisionConfig means by a missing key.
DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "use_clipped_linears": False,
    "standardize": False,
    "rope_parameters": None,
}
# The same of Gemma4ImageProcessor. It leaves bytes from 0 to 1, which its encoder makes from -1 to 1.
PROCESSOR = {
    "resample": BICUBIC,
    "rescale_factor": 1 / 255,
    "image_mean": HALF,
    "image_std": HALF,
    "max_soft_tokens": 280,
    "pooling_kernel_size": 3,
}
THETA = 100.0
_LAYER = "vision_tower.encoder.layers.*"
TENSORS = {
    "vision_tower.patch_embedder.input_proj.weight": "patch_embed.weight.HWC",
    "vision_tower.patch_embedder.position_embedding_table": "positions",
    f"{_LAYER}.input_layernorm": "layers.*.norm1",
    f"{_LAYER}.post_attention_layernorm": "layers.*.after1",
    f"{_LAYER}.pre_feedforward_layernorm": "layers.*.norm2",
    f"{_LAYER}.post_feedforward_layernorm": "layers.*.after2",
    f"{_LAYER}.self_attn.q_norm": "layers.*.attn.q_norm",
    f"{_LAYER}.self_attn.k_norm": "layers.*.attn.k_norm",
    **{f"{_LAYER}.self_attn.{part}_proj": f"layers.*.attn.{part}_proj" for part in "qkvo"},
    **{f"{_LAYER}.self_attn.{part}_proj.linear": f"layers.*.attn.{part}_proj" for part in "qkvo"},
    **{f"{_LAYER}.mlp.{part}_proj": f"layers.*.mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"{_LAYER}.mlp.{part}_proj.linear": f"layers.*.mlp.{part}_proj" for part in ("gate", "up", "down")},
    "vision_tower.std_bias": "projector.step1.bias",
    "vision_tower.std_scale": "projector.step1.scale",
    "embed_vision.embedding_projection": "projector.step3",
}


def encoder(sight: Sight) -> VisionSpec:
    """See ``VisionFamily.encoder``."""
    vision, out = sight.vision, sight.text.integer("hidden_size")
    vision.require("attention_bias", False)
    vision.require("num_key_value_heads", vision.integer("num_attention_heads"))
    rope = Fields(vision.mapping("rope_parameters"), {"rope_theta": THETA}, name=f"{vision.name}: rope_parameters")
    patch, size, side = (
        square(vision, "patch_size"),
        vision.integer("hidden_size"),
        vision.integer("pooling_kernel_size"),
    )
    norm, cells = RMS(vision.number("rms_norm_eps")), vision.integer("position_embedding_size")
    plain = RMS(norm.eps, weighted=False)
    layer = VisionLayer(
        attention=VisionAttention(
            heads=vision.integer("num_attention_heads"),
            head_dim=vision.integer("head_dim"),
            bias=False,
            out_bias=False,
            scale=1.0,
            qk_norm=norm,
            v_norm=plain,
        ),
        feed_forward=GatedMLP(
            inner=vision.integer("intermediate_size"), activation=activation(vision, "hidden_activation"), bias=False
        ),
        norm=norm,
        after=norm,
        clipped=vision.flag("use_clipped_linears"),
    )
    return VisionSpec(
        patch_values=3 * patch**2,
        size=size,
        out=out,
        layers=(layer,) * vision.integer("num_hidden_layers", maximum=MAX_LAYERS),
        side=side,
        projector=(
            Merged(side, "mean"),
            Standardized(size**0.5, learned=vision.flag("standardize")),
            Normed(plain),
            Projected(out, bias=False),
        ),
        patch_bias=False,
        table=TablePositions(rows=cells, columns=cells, between="axes"),
        rope=Rope2D(theta=rope.number("rope_theta"), pairs="quarter", column_first=True),
        bidirectional=sight.text.get("use_bidirectional_attention") == "vision",
    )


def pictures(sight: Sight) -> Preparation:
    """See ``VisionFamily.preparation``."""
    files, patch = sight.processor, square(sight.vision, "patch_size")
    side = sight.vision.integer("pooling_kernel_size")
    files.require("patch_size", patch)
    files.require("pooling_kernel_size", side)
    files.require("do_normalize", False)
    own = Fields(
        {**files.values, "do_normalize": True, "image_mean": HALF, "image_std": HALF}, files.defaults, files.name
    )
    return preparation(
        own,
        layout=Budgeted(unit=patch * side, rows=files.integer("max_soft_tokens")),
        patch=patch,
        side=side,
        placeholder="<|image|>",
        row_token=sight.whole.integer("image_token_id", minimum=0),
        text=Surrounded(before="<|image>", after="<image|>"),
    )


FAMILIES = (
    VisionFamily(
        ("Gemma4ForConditionalGeneration",),
        encoder,
        pictures,
        TENSORS,
        DEFAULTS,
        {"image_token_id": 258880},
        PROCESSOR,
        vision_types=("gemma4_vision",),
    ),
)
