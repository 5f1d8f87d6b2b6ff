"""The gated feed-forward block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax.kernels.attention import RaggedBatch
from llmjax.kernels.blocks import MLPWeights, mlp, mlp_inner
from llmjax.kernels.linear import linear
from llmjax.models.layers.linear import Linear
from llmjax.models.layers.norm import RMSNorm


class MLP(nnx.Module):
    """``x + after(down(act(gate(n)) * up(n)))`` with ``n = before(x)``.

    Args:
        size, inner: outer and intermediate size.
    """

    def __init__(self, size: int, inner: int, *, bias: bool, activation: str, dtype: jnp.dtype) -> None:
        self.gate_proj = Linear(size, inner, bias=bias, dtype=dtype)
        self.up_proj = Linear(size, inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, size, bias=bias, dtype=dtype)
        self.activation = activation

    def __call__(self, x: jax.Array, batch: RaggedBatch, *, before: RMSNorm, after: RMSNorm | None) -> jax.Array:
        return mlp(x, self.weights(before=before, after=after), activation=self.activation)

    def inner(self, x: jax.Array, *, before: RMSNorm | None) -> jax.Array:
        """What ``down_proj`` is given, [T, inner]."""
        return mlp_inner(x, self.weights(before=before, after=None), activation=self.activation)

    def alone(self, n: jax.Array) -> jax.Array:
        """``down(act(gate(n)) * up(n))``."""
        down = self.down_proj.projection
        return linear(self.inner(n, before=None), down.weight, down.bias)

    def weights(self, *, before: RMSNorm | None, after: RMSNorm | None) -> MLPWeights:
        """As kernels take them."""
        return MLPWeights(
            before=None if before is None else before.norm,
            gate=self.gate_proj.projection,
            up=self.up_proj.projection,
            down=self.down_proj.projection,
            after=None if after is None else after.norm,
        )
