"""The specification of ``llmjax.kernels.experts.experts``: expert by expert, all tokens through each, in f32."""

from __future__ import annotations

import jax
import numpy as np

from llmjax.kernels.activations import gated
from llmjax.kernels.blocks import ExpertWeights, Projection
from llmjax.kernels.qtensor import QTensor


def experts_reference(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, weights: ExpertWeights, *, activation: str
) -> np.ndarray:
    """See ``llmjax.kernels.experts.experts``; f32 [T, D]."""
    wide, out = np.asarray(x, np.float32), np.zeros(x.shape, np.float32)
    stacks = zip(*(_matrices(stack) for stack in (weights.gate, weights.up, weights.down)), strict=True)
    for expert, (gate, up, down) in enumerate(stacks):
        inner = np.asarray(gated(activation, _product(wide, *gate), _product(wide, *up)))
        share = np.where(np.asarray(chosen) == expert, shares, 0).sum(axis=1, keepdims=True)
        out += share * _product(inner, *down)
    return out


def _matrices(stack: Projection) -> list[tuple[np.ndarray, np.ndarray]]:
    """The experts' weights [out, in] and biases [out], f32."""
    weight = _dequantize(stack.weight) if isinstance(stack.weight, QTensor) else stack.weight
    bias = np.zeros(weight.shape[:2]) if stack.bias is None else stack.bias
    return list(zip(np.asarray(weight, np.float32), np.asarray(bias, np.float32), strict=True))


def _product(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return x @ weight.T + bias


_dequantize = jax.jit(QTensor.dequantize)
