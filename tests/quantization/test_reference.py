"""Quantisers against the `gguf` package, byte for byte."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.checkpoint.ggml import GGML_TYPES, dequantize
from llmjax.errors import CheckpointError, ConfigError
from llmjax.quantization.reference import SCHEMES, quantize


def reference(weights: np.ndarray, scheme: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.quantize(weights, gguf.GGMLQuantizationType[scheme.upper()])


@pytest.mark.parametrize("spread", [1e-6, 0.02, 1.0, 1e4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_random_weights(scheme: str, spread: float) -> None:
    weights = np.random.default_rng(0).standard_normal((67, 1088)).astype(np.float32) * np.float32(spread)
    assert np.array_equal(quantize(weights, scheme), reference(weights, scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_extreme_blocks(scheme: str) -> None:
    rows = np.zeros((9, 32), np.float32)
    rows[1] = -0.0
    rows[2] = 1.0
    rows[3] = np.arange(32) - 16  # ties in magnitude, halves
    rows[4] = np.linspace(-127, 127, 32)
    rows[5] = np.arange(32) % 2 * 2 - 1
    rows[6, 7] = 3e38  # a scale beyond f16
    rows[7] = 1e-7 * np.arange(32)
    rows[8] = np.arange(32) + 0.5
    assert np.array_equal(quantize(rows, scheme), reference(rows, scheme))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(list(SCHEMES)), st.lists(st.floats(-65504, 65504, width=16), min_size=32, max_size=32))
def test_any_block_of_halves(scheme: str, numbers: list[float]) -> None:
    weights = np.array([numbers], np.float32)
    assert np.array_equal(quantize(weights, scheme), reference(weights, scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bfloat16_weights_and_the_way_back(scheme: str) -> None:
    weights = np.random.default_rng(1).standard_normal((4, 64)).astype(ml_dtypes.bfloat16)
    raw = quantize(weights, scheme)
    assert np.array_equal(raw, reference(weights.astype(np.float32), scheme))
    block = next(block for block in GGML_TYPES.values() if block.name == scheme.upper())
    back = dequantize(raw, block, np.dtype(np.float32))
    assert np.abs(back - weights.astype(np.float32)).max() < {"q8_0": 0.02, "q5_0": 0.2, "q5_1": 0.2}.get(scheme, 0.4)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="scheme 'q9' is unknown; known are q4_0, q4_1"):
        quantize(np.zeros((1, 32), np.float32), "q9")
    with pytest.raises(CheckpointError, match="rows of 33 weights cannot be quantised to q4_0 in blocks of 32"):
        quantize(np.zeros((1, 33), np.float32), "q4_0")
    with pytest.raises(CheckpointError, match="infinite or not a number"):
        quantize(np.full((1, 32), np.nan, np.float32), "q8_0")
