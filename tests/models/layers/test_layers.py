"""Norms, activations and the embedding against their definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from llmjax.kernels.activations import ACTIVATIONS, CLAMPED_SWIGLU, gated
from llmjax.kernels.norm import layer_norm
from llmjax.models.layers.norm import RMS
from llmjax.models.modules.embedding import Embedding
from llmjax.models.modules.norm import build_norm

RNG = np.random.default_rng(0)


def with_weight(module: Any, weight: Any) -> Any:
    module.weight = nnx.Param(jnp.asarray(weight))
    return module


def test_rms_norm() -> None:
    x, weight = RNG.standard_normal((3, 8)).astype(np.float32), RNG.standard_normal(8).astype(np.float32)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-3)
    plain = with_weight(build_norm(RMS(1e-3), 8), weight)(jnp.asarray(x))
    plus_one = with_weight(build_norm(RMS(1e-3, plus_one=True), 8), weight)(jnp.asarray(x))
    np.testing.assert_allclose(plain, expected * weight, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(plus_one, expected * (1 + weight.astype(np.float64)), rtol=1e-6, atol=1e-6)


def test_rms_norm_statistics_are_f32_for_bf16_inputs() -> None:
    x = jnp.full((1, 4096), 1.0078125, jnp.bfloat16)  # a bf16 sum of the squares would stall at 256
    out = with_weight(build_norm(RMS(0.0), 4096), np.ones(4096, np.float32))(x)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), 1)


def tanh_gelu(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_norm(with_bias: bool) -> None:
    rng = np.random.default_rng(3)
    x, weight, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 2, 7), (2, 7), (2, 7)))
    x += 100  # the mean is taken away before squares are
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, dtype=np.float64)[..., None] + 1e-3) * weight
    got = layer_norm(jnp.asarray(x), jnp.asarray(weight), jnp.asarray(bias) if with_bias else None, eps=1e-3)
    np.testing.assert_allclose(got, expected + bias if with_bias else expected, rtol=0, atol=3e-5)
    narrow = layer_norm(jnp.asarray(x - 100, jnp.bfloat16), jnp.ones(7), None, eps=0)
    assert narrow.dtype == jnp.bfloat16
    assert np.abs(np.asarray(narrow, np.float32).mean(-1)).max() < 0.01


FORMULAS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x * sigmoid(x),
    "swish": lambda x: x * sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_new": tanh_gelu,
    "gelu_fast": tanh_gelu,
    "gelu_pytorch_tanh": tanh_gelu,
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "tanh": math.tanh,
}


def test_clamped_gates() -> None:
    gate = np.array([-9.0, -1.0, 0.0, 2.0, 7.0, 9.0], np.float32)
    up = np.array([-8.0, 0.5, 3.0, 8.0, 7.0, -7.0], np.float32)
    low, near = np.array([-9.0, -1.0, 0.0, 2.0, 7.0, 7.0]), np.array([-7.0, 0.5, 3.0, 7.0, 7.0, -7.0])
    expected = (near + 1) * low / (1 + np.exp(-1.702 * low))
    np.testing.assert_allclose(
        gated(CLAMPED_SWIGLU, jnp.asarray(gate), jnp.asarray(up)), expected, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(gated("relu", jnp.asarray(gate), jnp.asarray(up)), np.maximum(gate, 0) * up)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations(name: str) -> None:
    x = np.linspace(-6, 6, 101, dtype=np.float32)
    expected = [FORMULAS[name](float(v)) for v in x]
    np.testing.assert_allclose(ACTIVATIONS[name](jnp.asarray(x)), expected, rtol=1e-6, atol=1e-6)


def test_embedding_scale_is_rounded_to_the_activations_dtype() -> None:
    make = lambda dtype: Embedding(3, 4, scale=640**0.5, dtype=jnp.float32, activation_dtype=dtype)  # noqa: E731
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    tokens = jnp.array([2, 0, -1, 99])  # the last two: padding
    wide = with_weight(make(jnp.float32), rows)(tokens)
    np.testing.assert_allclose(wide[:2], rows[[2, 0]] * np.float32(640**0.5), rtol=1e-7)
    assert np.isfinite(wide).all()
    narrow = with_weight(make(jnp.bfloat16), rows)(tokens)
    expected = (jnp.asarray(rows, jnp.bfloat16) * jnp.bfloat16(640**0.5))[jnp.array([2, 0])]
    np.testing.assert_array_equal(narrow[:2].astype(jnp.float32), expected.astype(jnp.float32))
