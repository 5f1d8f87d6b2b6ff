"""Quantizers against ggml's own (golden file), byte for byte, and against the `gguf` package where it has them."""

from __future__ import annotations

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.errors import CheckpointError
from llmjax.weights.ggml import reference
from llmjax.weights.ggml.reference import QUANTIZERS, fill_blocks, quantize
from llmjax.weights.ggml.types import dequantize

GOLDEN = Path(__file__).parent / "golden" / "ggml.npz"
IN_PACKAGE = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq1_0", "tq2_0"]


def filled(weights: np.ndarray, scheme: str) -> np.ndarray:
    """uint8 [n, bytes of a block]."""
    block = QUANTIZERS[scheme].block
    numbers = weights.reshape(-1, block.elems)
    blocks = np.zeros(len(numbers), block.layout)
    fill_blocks(numbers, scheme, blocks)
    return blocks.view(np.uint8).reshape(len(numbers), -1)


def package(weights: np.ndarray, scheme: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.quantize(weights, gguf.GGMLQuantizationType[scheme.upper()])


@pytest.mark.parametrize("scheme", QUANTIZERS)
def test_ordinary_and_extreme_blocks_as_ggml_writes_them(scheme: str) -> None:
    with np.load(GOLDEN) as golden:
        weights, expected = golden["weights"], golden[scheme]
    before = weights.copy()
    assert np.array_equal(filled(weights, scheme), expected)
    assert np.array_equal(weights, before)


@pytest.mark.parametrize("scheme", QUANTIZERS)
def test_blocks_do_not_depend_on_their_neighbors(scheme: str) -> None:
    with np.load(GOLDEN) as golden:
        weights = golden["weights"][::7]
    together = filled(weights, scheme).reshape(len(weights), -1)
    before = weights.copy()
    one_by_one = [filled(row[None, : QUANTIZERS[scheme].block.elems], scheme)[0] for row in weights]
    assert np.array_equal(weights, before)
    assert np.array_equal(together[:, : len(one_by_one[0])], one_by_one)


@pytest.mark.parametrize("spread", [1e-6, 0.02, 1e4])
@pytest.mark.parametrize("scheme", IN_PACKAGE)
def test_random_weights_as_the_gguf_package(scheme: str, spread: float) -> None:
    weights = np.random.default_rng(0).standard_normal((67, 1280)).astype(np.float32) * np.float32(spread)
    assert np.array_equal(quantize(weights, scheme), package(weights, scheme))


@settings(max_examples=60)
@given(st.sampled_from(IN_PACKAGE[:5]), st.lists(st.floats(-65504, 65504, width=16), min_size=32, max_size=32))
def test_any_block_of_halves(scheme: str, numbers: list[float]) -> None:
    weights = np.array([numbers], np.float32) + np.float32(0)  # the package has its own way with -0
    assert np.array_equal(quantize(weights, scheme), package(weights, scheme))


ERRORS = {
    "q4_0": 0.1, "q4_1": 0.09, "q5_0": 0.05, "q5_1": 0.045, "q8_0": 0.006,
    "q2_k": 0.33, "q3_k": 0.17, "q4_k": 0.08, "q5_k": 0.04, "q6_k": 0.025,
    "iq4_nl": 0.08, "iq4_xs": 0.08, "tq1_0": 1.0, "tq2_0": 1.0, "mxfp4": 0.12,
}  # fmt: skip
"""Root mean square error of normal weights that each scheme stays below, relative to their spread."""


@pytest.mark.parametrize("scheme", QUANTIZERS)
def test_bfloat16_weights_and_the_way_back(scheme: str) -> None:
    weights = np.random.default_rng(1).standard_normal((4, 512)).astype(ml_dtypes.bfloat16)
    raw = quantize(weights, scheme)
    exact = weights.astype(np.float32)
    assert np.array_equal(raw, quantize(exact, scheme))
    back = dequantize(raw, QUANTIZERS[scheme].block, np.dtype(np.float32))
    error = float(np.sqrt(np.mean(np.square(back - exact))))
    assert ERRORS[scheme] / 2 < error < ERRORS[scheme]


def test_tiles_and_threads_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.random.default_rng(2).standard_normal((9, 2048)).astype(np.float32)
    whole = quantize(weights, "q4_k", threads=1)
    monkeypatch.setattr(reference, "TILE", 512)
    assert np.array_equal(quantize(weights, "q4_k", threads=3), whole)


def test_refusals() -> None:
    with pytest.raises(CheckpointError, match="rows of 33 weights cannot be quantized to q4_0 in blocks of 32"):
        quantize(np.zeros((1, 33), np.float32), "q4_0")
    with pytest.raises(CheckpointError, match="rows of 288 weights cannot be quantized to q4_k in blocks of 256"):
        quantize(np.zeros((1, 288), np.float32), "q4_k")
    with pytest.raises(CheckpointError, match="infinite or not a number"):
        quantize(np.full((1, 32), np.nan, np.float32), "q8_0")
    with pytest.raises(CheckpointError, match=r"weights up to 1e\+38 are too large for q6_k"):
        quantize(np.full((1, 256), 1e38, np.float32), "q6_k")
