"""BitNet's layers: ternary codes, packed or made of plain weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmjax.checkpoint import Checkpoint
from llmjax.errors import CheckpointError

Packed = tuple[dict[str, np.ndarray], np.ndarray]
SCALE = np.float32(0.75)


def packer(*, divided: bool, scales: int = 1) -> Callable[[int, int], Packed]:
    """Codes as transformers packs them: the first quarter of all rows in the lowest bits, then the next one."""
    rng = np.random.default_rng(0)

    def pack(outputs: int, inputs: int) -> Packed:
        codes = rng.integers(-1, 2, (outputs, inputs))
        quarters = (codes + 1).reshape(4, outputs // 4, inputs)
        packed = sum(quarter << 2 * i for i, quarter in enumerate(quarters)).astype(np.uint8)
        weight = codes * (1 / SCALE if divided else SCALE)
        parts = {".weight": packed, ".weight_scale": np.full(scales, SCALE).astype(ml_dtypes.bfloat16)}
        return parts, weight.astype(np.float32)

    return pack


def online(outputs: int, inputs: int) -> Packed:
    weight = np.random.default_rng(outputs).standard_normal((outputs, inputs)).astype(ml_dtypes.bfloat16)
    scale = 1 / np.float32(np.abs(weight.astype(np.float64)).mean())
    codes = np.clip(np.rint(weight.astype(np.float32) * scale), -1, 1)
    return {".weight": weight}, (codes / scale).astype(np.float32) + 0.0  # codes have no zero below zero


@pytest.mark.parametrize(
    ("settings", "pack"),
    [
        ({}, packer(divided=True)),
        ({"linear_class": "autobitlinear", "quantization_mode": "offline"}, packer(divided=False)),
    ],
)
def test_packed(settings: dict[str, Any], pack: Any, check_model: Callable[..., Checkpoint], small_tiles: None) -> None:
    check_model(pack, {"quant_method": "bitnet", **settings})


def test_online(check_model: Callable[..., Checkpoint], small_tiles: None) -> None:
    check_model(online, {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"})


@pytest.mark.parametrize(
    ("settings", "pack", "message"),
    [
        ({"use_rms_norm": True}, packer(divided=True), "use_rms_norm is true"),
        ({"linear_class": "other"}, packer(divided=True), "linear_class is 'other'"),
        ({}, packer(divided=True, scales=2), r"weight_scale' has 2 numbers, not one"),
    ],
)
def test_what_does_not_fit(
    settings: dict[str, Any], pack: Any, message: str, check_model: Callable[..., Checkpoint]
) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_model(pack, {"quant_method": "bitnet", **settings})
