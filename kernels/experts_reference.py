"""The specification of ``llmjax.kernels.experts.experts``: expert by expert, all tokens through each, in f32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from llmjax.kernels.activations import ACTIVATIONS
from llmjax.kernels.blocks import ExpertWeights, Projection
from llmjax.kernels.qtensor import QTensor


def experts_reference(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, weights: ExpertWeights, *, activation: str
) -> jax.Array:
    """See ``llmjax.kernels.experts.experts``; f32 [T, D]."""
    wide, out = x.astype(jnp.float32), jnp.zeros(x.shape, jnp.float32)
    for expert in range(weights.count):
        inner = ACTIVATIONS[activation](_product(wide, weights.gate, expert)) * _product(wide, weights.up, expert)
        share = jnp.where(chosen == expert, shares, 0).sum(axis=1, keepdims=True)
        out = out + share * _product(inner, weights.down, expert)
    return out


def _product(x: jax.Array, stack: Projection, expert: int) -> jax.Array:
    weight = stack.weight.dequantize() if isinstance(stack.weight, QTensor) else stack.weight
    out = jnp.matmul(x, weight[expert].astype(jnp.float32).T, precision="highest")
    return out if stack.bias is None else out + stack.bias[expert].astype(jnp.float32)
