"""AWQ layers packed code by code, as AutoAWQ's GEMM layout is described."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from llmjax.checkpoint.formats.awq import AWQPlanes
from llmjax.checkpoint.formats.quantized import QuantizedTensor

SCALES = np.array([0.01, 0.0, -0.0, 65504.0, 6e-8, -0.5], np.float16)
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def pack_columns(codes: np.ndarray) -> np.ndarray:
    """int32 [rows, columns / 8]: nibble n of word c holds column 8 c + ORDER[n]."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for row in range(codes.shape[0]):
        for word in range(words.shape[1]):
            words[row, word] = sum(int(codes[row, 8 * word + ORDER[n]]) << 4 * n for n in range(8))
    return words.view(np.int32)


def packer(group: int, values: np.ndarray = SCALES) -> Callable[[int, int], tuple[dict[str, np.ndarray], np.ndarray]]:
    rng = np.random.default_rng(group + 1)

    def pack(outputs: int, inputs: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        size = inputs if group == -1 else group
        codes = rng.integers(0, 16, (inputs, outputs))
        zeros = rng.integers(0, 16, (inputs // size, outputs))
        scales = rng.choice(values, zeros.shape)
        weight = np.empty((outputs, inputs), np.float32)
        for i in range(inputs):
            weight[:, i] = (codes[i] - zeros[i // size]).astype(np.float32) * scales[i // size].astype(np.float32)
        return {".qweight": pack_columns(codes), ".qzeros": pack_columns(zeros), ".scales": scales}, weight

    return pack


@pytest.mark.parametrize("group", [-1, 32])
def test_group_sizes(group: int, check_model: Callable, small_tiles: None) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    check_model(packer(group), settings)


def test_settings_in_a_file_of_their_own(check_model: Callable) -> None:
    settings = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    checkpoint = check_model(packer(32), settings, file="quant_config.json")
    assert checkpoint.tensors["model.layers.0.mlp.up_proj.weight"].type_name == "AWQ-4"


def test_logits(check_model: Callable, check_logits: Callable) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    check_logits(check_model(packer(32, np.array([0.01, 0.02, -0.015], np.float16)), settings))


def marlin_zeros(zeros: np.ndarray) -> np.ndarray:
    """Zero points, [groups, out], in the order of candle-vLLM's convert_awq_marlin.py, before it packs them in turn."""
    permutation = [i + 8 * j for i in range(8) for j in range(8)]
    found = zeros.reshape(-1, 64)[:, permutation].reshape(-1, 8)[:, ORDER].reshape(zeros.shape)
    words = np.zeros((len(zeros), zeros.shape[1] // 8), np.uint32)
    for nibble in range(8):
        words |= found[:, nibble::8].astype(np.uint32) << np.uint32(4 * nibble)
    return words.view(np.int32)


def rounded(outputs: int, inputs: int, *, size: int = 32) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Random weights rounded as AWQ does it; also the zero points, [groups, out]."""
    rng = np.random.default_rng(7)
    original = rng.standard_normal((inputs // size, size, outputs)) + rng.normal(0, 0.2, (inputs // size, 1, outputs))
    low, high = original.min(axis=1), original.max(axis=1)
    scales = ((high - low) / 15).astype(np.float16)
    zeros = np.clip(np.round(-low / scales), 0, 15).astype(np.int64)
    codes = np.clip(np.round(original / scales[:, None]) + zeros[:, None], 0, 15).astype(np.int64)
    weight = (codes - zeros[:, None]).astype(np.float32) * scales[:, None].astype(np.float32)
    parts = {".qweight": pack_columns(codes.reshape(inputs, outputs)), ".qzeros": pack_columns(zeros)}
    return parts | {".scales": scales}, weight.reshape(inputs, outputs).T, zeros


@pytest.mark.parametrize("reordered", [False, True])
def test_zero_points_that_were_reordered_for_marlin(reordered: bool) -> None:
    parts, weight, zeros = rounded(128, 256)
    if reordered:
        parts[".qzeros"] = marlin_zeros(zeros)
    planes = AWQPlanes(parts[".qweight"], parts[".qzeros"], parts[".scales"], 32)
    tensor = QuantizedTensor("w", "AWQ-4", planes, 0)
    assert planes.is_reordered is reordered
    np.testing.assert_array_equal(tensor.read(np.dtype(np.float32)), weight)
    rows = planes.rows(64, 100)
    assert rows.zeros is not None
    np.testing.assert_array_equal(rows.zeros, zeros.T[64:100])


def test_outputs_that_cannot_be_reordered() -> None:
    parts, weight, _ = rounded(72, 64)
    planes = AWQPlanes(parts[".qweight"], parts[".qzeros"], parts[".scales"], 32)
    assert not planes.is_reordered and planes.row_step == 8
    np.testing.assert_array_equal(QuantizedTensor("w", "AWQ-4", planes, 0).read(np.dtype(np.float32)), weight)
