"""Activation functions of feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp

_tanh_gelu = partial(jax.nn.gelu, approximate=True)

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {
        "silu": jax.nn.silu,
        "swish": jax.nn.silu,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_new": _tanh_gelu,
        "gelu_fast": _tanh_gelu,
        "gelu_pytorch_tanh": _tanh_gelu,
        "relu": jax.nn.relu,
        "relu2": lambda x: jnp.square(jax.nn.relu(x)),
        "tanh": jnp.tanh,
        "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    }
)
"""By the names that config.json uses."""

CLAMPED_SWIGLU = "clamped_swiglu"
"""gpt-oss's way to gate, which changes what is gated too."""
CLAMPED_AT, CLAMPED_SLOPE = 7.0, 1.702


NORMAL_CDF = "normal_cdf"
"""What x is multiplied with to become gelu(x)."""


def gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """``activation(gate) * up``.

    Args:
        activation: a key of ACTIVATIONS, NORMAL_CDF, or CLAMPED_SWIGLU: ``g sigmoid(1.702 g) (u + 1)``, where g is the
            gate up to 7, and u is ``up`` between -7 and 7 (formula: Hugging Face's ``GptOssExperts``).
        gate, up: arrays of one shape.
    """
    if activation == NORMAL_CDF:
        return 0.5 * (1 + jax.lax.erf(gate * 0.5**0.5)) * up
    if activation != CLAMPED_SWIGLU:
        return ACTIVATIONS[activation](gate) * up
    gate, up = jnp.minimum(gate, CLAMPED_AT), jnp.clip(up, -CLAMPED_AT, CLAMPED_AT)
    return gate * jax.nn.sigmoid(CLAMPED_SLOPE * gate) * (up + 1)
