"""The gated feed-forward block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import ModelConfig
from models.layers.linear import Linear

_tanh_gelu = partial(jax.nn.gelu, approximate=True)

# By the names that config.json uses.
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {
        "silu": jax.nn.silu,
        "swish": jax.nn.silu,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_new": _tanh_gelu,
        "gelu_fast": _tanh_gelu,
        "gelu_pytorch_tanh": _tanh_gelu,
        "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    }
)


class MLP(nnx.Module):
    """``down(act(gate(x)) * up(x))``; the activation is computed in f32."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype) -> None:
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(size, inner, bias=bias, dtype=dtype)
        self.up_proj = Linear(size, inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, size, bias=bias, dtype=dtype)
        self.activation = config.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = ACTIVATIONS[self.activation](self.gate_proj(x).astype(jnp.float32)).astype(x.dtype)
        return self.down_proj(gate * self.up_proj(x))
