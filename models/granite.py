"""Granite 3: Llama with scaling factors for embeddings, attention, the output of each sublayer, and logits."""

from __future__ import annotations

from collections.abc import Sequence

from llmjax.models import llama
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import decoder_config, full_attention, gated_mlp, layer_types, rms
from llmjax.models.layers.layer import FeedForward, LayerSpec, Mixer
from llmjax.models.layers.residual import PreNorm
from llmjax.models.mamba2 import state_space

# What Hugging Face's GraniteConfig means by a missing key.
DEFAULTS = {
    **llama.DEFAULTS,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    return granite_config(fields, gated_mlp(fields, bias=fields.flag("mlp_bias")))


def granite_config(
    fields: Fields, feed_forward: FeedForward, *, rotary: bool = True, mamba: Sequence[bool] | None = None
) -> ModelConfig:
    """A model whose layers differ only in their mixers, with the config's scaling factors.

    Args:
        rotary: False: no layer has a rotary embedding.
        mamba: for each layer, whether it has a Mamba 2 mixer in place of attention; None: no layer has.
    """
    count, norm = len(layer_types(fields, kinds=("full_attention",))), rms(fields)
    scale = fields.number("attention_multiplier")
    attention = full_attention(fields, rotary=rotary, scale=scale, bias="attention_bias")
    residual = PreNorm(scale=fields.number("residual_multiplier"))
    mixers: list[Mixer] = [attention] * count
    if mamba is not None and any(mamba):
        recurrent = state_space(fields, norm=norm)
        mixers = [recurrent if one else attention for one in mamba]
    return decoder_config(
        fields,
        layers=[LayerSpec(mixer=each, feed_forward=feed_forward, norm=norm, residual=residual) for each in mixers],
        norm=norm,
        embedding_scale=fields.number("embedding_multiplier"),
        logit_scale=1 / fields.number("logits_scaling"),
    )


FAMILIES = (Family(from_hf, DEFAULTS, architectures=("GraniteForCausalLM",), model_types=("granite",)),)
