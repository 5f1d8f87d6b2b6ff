"""Activation functions of feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import jax

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
        "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    }
)
"""By the names that config.json uses."""
