"""The gated feed-forward block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from kernels.blocks import MLPWeights, mlp, mlp_inner
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
        return mlp(x, self.weights(before=before, after=after), activation=self.activation)

    def inner(self, x: jax.Array, *, before: RMSNorm) -> jax.Array:
        """What ``down_proj`` is given, [T, intermediate]."""
        return mlp_inner(x, self.weights(before=before, after=None), activation=self.activation)

    def weights(self, *, before: RMSNorm, after: RMSNorm | None) -> MLPWeights:
        """As kernels take them."""
        return MLPWeights(
            before=before.norm,
            gate=self.gate_proj.projection,
            up=self.up_proj.projection,
            down=self.down_proj.projection,
            after=None if after is None else after.norm,
        )
