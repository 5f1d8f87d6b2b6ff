"""Mamba and Falcon Mamba: layers with a Mamba mixer and no MLP."""

from __future__ import annotations

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, decoder_config
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.mamba import Mamba
from llmjax.models.layers.norm import RMS
from llmjax.models.layers.residual import MixerAlone
from llmjax.models.names import Names

# What Hugging Face's MambaConfig and FalconMambaConfig mean by a missing key.
DEFAULTS = {
    "vocab_size": 50280,
    "hidden_size": 768,
    "intermediate_size": None,
    "num_hidden_layers": 32,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "mixer_rms_eps": 1e-6,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": "auto",
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "max_position_embeddings": 2**18,  # no such key in files: a sensible limit for the published models
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
ALIASES = {
    "mamba_d_state": ("state_size",),
    "mamba_d_conv": ("conv_kernel",),
    "mamba_expand": ("expand",),
    "mamba_dt_rank": ("time_step_rank",),
    "mamba_conv_bias": ("use_conv_bias",),
    "mamba_proj_bias": ("use_bias",),
}
NAMES = Names(
    prefix="backbone.",
    modules={
        "embeddings": "model.embed_tokens",
        "norm_f": "model.norm",
        "layers.*.norm": "model.layers.*.input_layernorm",
        **{
            f"layers.*.mixer{part}": f"model.layers.*.mamba{part}"
            for part in ("", ".in_proj", ".conv1d", ".x_proj", ".dt_proj", ".out_proj")
        },
    },
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    return _state_spaces(fields, norm=None)


def falcon_from_hf(fields: Fields) -> ModelConfig:
    """`from_hf` for Falcon Mamba, whose mixers contain norms without weights."""
    return _state_spaces(fields, norm=RMS(fields.number("mixer_rms_eps"), weighted=False))


def _state_spaces(fields: Fields, *, norm: RMS | None) -> ModelConfig:
    count, outer = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), RMS(fields.number("layer_norm_epsilon"))
    mixer = state_space(fields, norm=norm, inner=fields.optional_integer("intermediate_size"))
    layer = LayerSpec(mixer=mixer, feed_forward=None, norm=outer, residual=MixerAlone())
    return decoder_config(fields, layers=[layer] * count, norm=outer)


def state_space(fields: Fields, *, norm: RMS | None, inner: int | None = None) -> Mamba:
    """The Mamba mixer of a family, from the keys in DEFAULTS.

    Args:
        norm: see ``Mamba``.
        inner: number of channels; None: ``mamba_expand`` times the hidden size.
    """
    size, rank = fields.integer("hidden_size"), fields.get("mamba_dt_rank")
    return Mamba(
        inner=inner or fields.integer("mamba_expand") * size,
        state_dim=fields.integer("mamba_d_state"),
        rank=-(-size // 16) if rank == "auto" else fields.integer("mamba_dt_rank"),
        width=fields.integer("mamba_d_conv", minimum=2),
        activation=fields.choice("hidden_act", ACTIVATIONS),
        norm=norm,
        conv_bias=fields.flag("mamba_conv_bias"),
        bias=fields.flag("mamba_proj_bias"),
    )


FAMILIES = (
    Family(
        from_hf, DEFAULTS, architectures=("MambaForCausalLM",), model_types=("mamba",), aliases=ALIASES, names=NAMES
    ),
    Family(
        falcon_from_hf,
        DEFAULTS,
        architectures=("FalconMambaForCausalLM",),
        model_types=("falcon_mamba",),
        aliases=ALIASES,
        names=NAMES,
    ),
)
