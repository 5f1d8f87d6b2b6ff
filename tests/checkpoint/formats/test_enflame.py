"""Int8 layers as Enflame's tools write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llmjax.checkpoint import Checkpoint
from llmjax.errors import CheckpointError

Packed = tuple[dict[str, np.ndarray], np.ndarray]


def w8a16(outputs: int, inputs: int, *, groups: int = 1, repacked: bool = False) -> Packed:
    rng = np.random.default_rng(outputs)
    codes = rng.integers(-128, 128, (outputs, inputs), np.int8)
    scales = rng.uniform(0.001, 0.1, (groups, outputs)).astype(np.float16)
    weight = np.empty((outputs, inputs), np.float32)
    for i in range(inputs):
        weight[:, i] = codes[:, i].astype(np.float32) * scales[i * groups // inputs].astype(np.float32)
    stored = {".qweight": np.ascontiguousarray(codes.T)} if repacked else {".weight": codes}
    return stored | {".scales": scales}, weight


def w8a8(outputs: int, inputs: int, *, divisors: int) -> Packed:
    """``divisors``: numbers in ``in_scales``; 0: one for each input."""
    rng = np.random.default_rng(outputs)
    codes = rng.integers(-128, 128, (outputs, inputs), np.int8)
    out = rng.uniform(0.001, 0.1, outputs).astype(np.float32)
    given = rng.uniform(0.5, 2, divisors or inputs).astype(np.float32)
    if divisors == 1:
        weight = codes.astype(np.float32) * (out / given)[:, None]
    else:
        weight = codes.astype(np.float32) * out[:, None] / (given if divisors == 0 else 1)
    return {".weight": codes, ".out_scales": out, ".in_scales": given}, weight


def test_weights_of_8_bits(check_model: Callable[..., Checkpoint]) -> None:
    check_model(w8a16, {"quant_method": "w8a16"})


@pytest.mark.parametrize("groups", [1, 2])
def test_repacked_gptq(groups: int, check_model: Callable[..., Checkpoint], small_tiles: None) -> None:
    settings = {"quant_method": "w8a16", "bits": 8, "group_size": 128, "sym": True, "desc_act": False}
    check_model(lambda o, i: w8a16(o, i, groups=groups, repacked=True), settings)


def test_activations_of_8_bits(check_model: Callable[..., Checkpoint]) -> None:
    check_model(lambda o, i: w8a8(o, i, divisors=1), {"quant_method": "w8a8", "group_size": -1})


def test_scales_of_inputs(check_model: Callable[..., Checkpoint], caplog: pytest.LogCaptureFixture) -> None:
    check_model(lambda o, i: w8a8(o, i, divisors=0), {"quant_method": "w8a8"}, records=False)
    assert "of type W8A8-8 is dequantized: columns have scales" in caplog.text


@pytest.mark.parametrize(
    ("settings", "pack", "message"),
    [
        ({"quant_method": "w8a16", "sym": False}, w8a16, "sym"),
        ({"quant_method": "w8a16", "desc_act": True}, w8a16, "desc_act"),
        ({"quant_method": "w8a16", "bits": 4}, w8a16, "bits"),
        ({"quant_method": "w8a16"}, lambda o, i: w8a16(o, i, groups=2), r"\.scales.*numbers for"),
        ({"quant_method": "w8a16"}, lambda o, i: w8a16(o, i, groups=7, repacked=True), "fits no groups"),
        ({"quant_method": "w8a8"}, lambda o, i: w8a8(o, i, divisors=3), "are not one number above 0"),
    ],
)
def test_what_does_not_fit(
    settings: dict[str, Any], pack: Callable[[int, int], Packed], message: str, check_model: Callable[..., Checkpoint]
) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_model(pack, settings)
