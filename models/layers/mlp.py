"""The gated feed-forward block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from kernels.fused import linear_add, norm_gated
from models.config import ModelConfig
from models.layers.linear import Linear
from models.layers.norm import RMSNorm


class MLP(nnx.Module):
    """``x + after(down(act(gate(n)) * up(n)))`` with ``n = before(x)``."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype) -> None:
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(size, inner, bias=bias, dtype=dtype)
        self.up_proj = Linear(size, inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, size, bias=bias, dtype=dtype)
        self.activation = config.activation

    def __call__(self, x: jax.Array, *, before: RMSNorm, after: RMSNorm | None) -> jax.Array:
        inner = self.inner(x, before=before)
        return linear_add(inner, self.down_proj.projection, after.norm if after is not None else None, x)

    def inner(self, x: jax.Array, *, before: RMSNorm) -> jax.Array:
        """What ``down_proj`` is given, [T, intermediate]."""
        gate, up = self.gate_proj.projection, self.up_proj.projection
        return norm_gated(x, before.norm, gate, up, activation=self.activation)
