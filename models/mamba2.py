"""Mamba 2: layers with a Mamba 2 mixer and no MLP; and the reader of such mixers for hybrid families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.models.config import ModelConfig
from llmjax.models.family import Family
from llmjax.models.fields import Fields
from llmjax.models.hf_config import MAX_LAYERS, decoder_config
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.mamba2 import Mamba2
from llmjax.models.layers.norm import RMS
from llmjax.models.layers.residual import MixerAlone
from llmjax.models.names import Names

# What a missing key of the mixer means in the families that use these names.
MAMBA_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": (0.0, float("inf")),
}
# What Hugging Face's Mamba2Config means by a missing key.
DEFAULTS = {
    **MAMBA_DEFAULTS,
    "vocab_size": 32768,
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "mamba_d_state": 128,
    "mamba_n_groups": 8,
    "mamba_d_head": 64,
    "max_position_embeddings": 2**18,  # no such key in files: a sensible limit for the published models
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
ALIASES = {
    "mamba_n_heads": ("num_heads",),
    "mamba_n_groups": ("n_groups",),
    "mamba_d_state": ("state_size",),
    "mamba_d_head": ("head_dim",),
    "mamba_d_conv": ("conv_kernel",),
    "mamba_expand": ("expand",),
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
            for part in ("", ".in_proj", ".conv1d", ".norm", ".out_proj")
        },
    },
)


def from_hf(fields: Fields) -> ModelConfig:
    """See ``Family.read``."""
    count, norm = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), RMS(fields.number("layer_norm_epsilon"))
    mixer = state_space(fields, norm=norm)
    layer = LayerSpec(mixer=mixer, feed_forward=None, norm=norm, residual=MixerAlone())
    return decoder_config(fields, layers=[layer] * count, norm=norm)


def state_space(
    fields: Fields, *, norm: RMS | None, inner: str | None = None, activation: str = "hidden_act", **differences: Any
) -> Mamba2:
    """The Mamba 2 mixer of a family, from the keys in MAMBA_DEFAULTS.

    Args:
        norm: see ``Mamba2``.
        inner: the key with the size of all heads together; None: ``mamba_expand`` times the hidden size.
        activation: the key that names the activation.
        differences: fields of Mamba2 in which the family differs from most others.
    """
    heads, groups = fields.integer("mamba_n_heads"), fields.integer("mamba_n_groups")
    if heads % groups:
        raise fields.error("mamba_n_groups", f"does not divide mamba_n_heads = {heads}")
    size = None if inner is None else fields.optional_integer(inner)
    size = size or fields.integer("mamba_expand") * fields.integer("hidden_size")
    if fields.get("mamba_d_head") != "auto":
        head_dim = fields.integer("mamba_d_head")
    elif size % heads:
        raise fields.error("mamba_n_heads", f"does not divide {size}, the size of all heads")
    else:
        head_dim = size // heads
    if heads * head_dim != size:
        raise fields.error("mamba_d_head", f"times mamba_n_heads = {heads} is not {size}")
    bias = fields.flag("mamba_proj_bias")
    known: dict[str, Any] = {
        "heads": heads,
        "head_dim": head_dim,
        "groups": groups,
        "state_dim": fields.integer("mamba_d_state"),
        "width": fields.integer("mamba_d_conv", minimum=2),
        "activation": fields.choice(activation, ACTIVATIONS),
        "norm": norm,
        "steps": step_limits(fields),
        "conv_bias": fields.flag("mamba_conv_bias"),
        "in_bias": bias,
        "out_bias": bias,
    }
    return Mamba2(**(known | differences))


def step_limits(fields: Fields) -> tuple[float, float]:
    """The smallest and the largest time step."""
    value = fields.get("time_step_limit")
    if value is None:
        return (0.0, float("inf"))
    # Transformers 5 writes numbers that JSON lacks, such as infinity, as objects.
    ends = (
        [float("inf") if end == {"__float__": "Infinity"} else end for end in value]
        if isinstance(value, Sequence)
        else []
    )
    if len(ends) != 2 or any(type(end) not in (int, float) for end in ends) or not 0 <= ends[0] <= ends[1]:
        raise fields.error("time_step_limit", "must be two numbers, the smaller one first")
    return (float(ends[0]), float(ends[1]))


FAMILIES = (
    Family(
        from_hf, DEFAULTS, architectures=("Mamba2ForCausalLM",), model_types=("mamba2",), aliases=ALIASES, names=NAMES
    ),
)
