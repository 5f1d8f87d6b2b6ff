"""Marlin layers packed by the steps that the kernel's authors describe, value by value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmjax.checkpoint.formats.registry import plain_tensors
from llmjax.checkpoint.safetensors import SafetensorsTensor
from llmjax.errors import CheckpointError

M = "model.layers.0.mlp.up_proj"


def code_order() -> list[int]:
    """Which of 1024 values (four 16 x 16 tiles, inputs first) comes where."""
    order = []
    for lane in range(32):
        one = []
        for block in (0, 1):
            for row in (2 * (lane % 4), 2 * (lane % 4) + 1, 2 * (lane % 4 + 4), 2 * (lane % 4 + 4) + 1):
                one.append(16 * row + lane // 4 + 8 * block)
        for tile in range(4):
            order += [place + 256 * tile for place in one]
    return [order[8 * run + k] for run in range(128) for k in (0, 2, 4, 6, 1, 3, 5, 7)]


def scale_order(grouped: bool) -> list[int]:
    if grouped:
        return [i + 8 * j for i in range(8) for j in range(8)]
    return [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]


def pack(codes: np.ndarray, scales: np.ndarray) -> dict[str, np.ndarray]:
    """From codes [in, out] and scales [groups, out]."""
    inputs, outputs = codes.shape
    rows = []
    for k in range(0, inputs, 16):
        tiles = [int(codes[k + i, n + j]) for n in range(0, outputs, 16) for i in range(16) for j in range(16)]
        stream = [tiles[run + place] for run in range(0, len(tiles), 1024) for place in code_order()]
        rows.append([sum(stream[w + i] << 4 * i for i in range(8)) for w in range(0, len(stream), 8)])
    flat = scales.reshape(-1)
    order = scale_order(len(scales) > 1)
    stored = [flat[run + place] for run in range(0, flat.size, len(order)) for place in order]
    return {
        ".B": np.array(rows, np.uint32).view(np.int32),
        ".s": np.array(stored, np.float16).reshape(scales.shape),
        ".workspace": np.zeros(16, np.int32),
    }


def open_layer(parts: dict[str, np.ndarray], **changes: Any) -> Any:
    names = {np.dtype(np.int32): "I32", np.dtype(np.float16): "F16"}
    stored = {
        M + part: SafetensorsTensor(M + part, names[array.dtype], array.shape, array, Path("/model/x.safetensors"))
        for part, array in parts.items()
    }
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "checkpoint_format": "marlin"}
    return plain_tensors(stored, {"quantization_config": settings | changes}, Path("/model"))


@pytest.mark.parametrize(
    "method", [{}, {"checkpoint_format": None, "is_marlin_format": True}, {"quant_method": "marlin"}]
)
@pytest.mark.parametrize("group", [-1, 128])
def test_unpacking(group: int, method: dict[str, Any], same: Callable[..., bool], small_tiles: None) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (256, 192))
    scales = rng.choice(np.array([0.01, 0.0, -0.0, 65504.0, 6e-8], np.float16), (1 if group == -1 else 2, 192))
    weight = np.empty((192, 256), np.float32)
    for i in range(256):
        scale = scales[0 if group == -1 else i // group].astype(np.float32)
        weight[:, i] = (codes[i] - 8).astype(np.float32) * scale
    tensor = open_layer(pack(codes, scales), group_size=group, **method)[f"{M}.weight"]
    assert tensor.type_name == "Marlin-4"
    assert same(tensor.read(np.dtype(np.float32)), weight)


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({".s": None}, {}, "up_proj.s' is missing"),
        ({".B": np.zeros((16, 100), np.int32)}, {}, "not a whole number of runs of 64 outputs"),
        ({".B": np.zeros((9, 384), np.int32)}, {}, "144 inputs, not a multiple of the group size 128"),
        ({".s": np.full((2, 192), np.nan, np.float16)}, {}, "infinite or not a number"),
        ({".s": np.ones((1, 192), np.float16)}, {}, r"\.s' has shape \[1, 192\], but .* needs \[2, 192\]"),
        ({}, {"sym": False}, "sym is false, but Marlin checkpoints have no zero points"),
        ({}, {"desc_act": True}, "desc_act is true"),
        ({}, {"bits": 8}, "bits is 8; supported are 4"),
    ],
)
def test_refusals(change: dict[str, Any], config: dict[str, Any], message: str) -> None:
    parts: dict[str, Any] = {".B": np.zeros((16, 384), np.int32), ".s": np.ones((2, 192), np.float16)} | change
    with pytest.raises(CheckpointError, match=message):
        open_layer({part: array for part, array in parts.items() if array is not None}, **config)
