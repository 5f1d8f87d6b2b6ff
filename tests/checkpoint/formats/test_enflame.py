"""Int8 layers as Enflame's tools write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmjax.checkpoint import Checkpoint
from llmjax.checkpoint.formats.registry import plain_tensors
from llmjax.checkpoint.safetensors import SafetensorsTensor
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


def nk(outputs: int, inputs: int) -> Packed:
    """8 bits with outputs first, as transform_safetensors.py writes them."""
    stored, weight = w8a16(outputs, inputs, groups=2, repacked=True)
    return {**stored, ".qweight": np.ascontiguousarray(stored[".qweight"].T)}, weight


def nibbles(outputs: int, inputs: int, *, group: int, transposed: bool = False) -> Packed:
    """4 bits, byte by byte: input 128 r + i is the low nibble of byte 64 r + i, or the high one of 64 further on."""
    rng = np.random.default_rng(inputs)
    codes = rng.integers(0, 16, (outputs, inputs), np.uint8)
    zeros = rng.integers(0, 16, (inputs // group, outputs)).astype(np.float16)
    scales = rng.uniform(0.001, 0.1, zeros.shape).astype(np.float16)
    packed = np.zeros((outputs, -(-inputs // 128) * 64), np.uint8)
    weight = np.empty((outputs, inputs), np.float32)
    for i in range(inputs):
        run, place = divmod(i, 128)
        packed[:, 64 * run + place % 64] |= codes[:, i] << (4 if place >= 64 else 0)
        weight[:, i] = (codes[:, i] - zeros[i // group].astype(np.float32)) * scales[i // group].astype(np.float32)
    packed = np.ascontiguousarray(packed.T) if transposed else packed
    return {".qweight": packed, ".qzeros": zeros * scales, ".scales": scales}, weight


def read(settings: dict[str, Any], **layers: Packed) -> dict[str, np.ndarray]:
    """The weights of a checkpoint with these layers."""
    kinds = {"int8": "I8", "uint8": "U8", "float16": "F16"}
    stored = {
        name + part: SafetensorsTensor(name + part, kinds[array.dtype.name], array.shape, array, Path("x"))
        for name, (parts, _) in layers.items()
        for part, array in parts.items()
    }
    found = plain_tensors(stored, {"quantization_config": settings}, Path("here"))
    return {name: found[f"{name}.weight"].read(np.dtype(np.float32)) for name in layers}


GPTQ8 = {"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": True, "desc_act": False}


@pytest.mark.parametrize("method", ["gptq", "w8a16"])
def test_outputs_first(method: str, check_model: Callable[..., Checkpoint], small_tiles: None) -> None:
    """Among them square matrices, which the others of the file tell apart."""
    check_model(nk, GPTQ8 | {"quant_method": method})


@pytest.mark.parametrize(("method", "transposed"), [("awq", False), ("awq", True), ("gptq", False)])
def test_nibbles(method: str, transposed: bool) -> None:
    settings = {"quant_method": method, "bits": 4, "group_size": 64, "zero_point": True}
    shapes = {"square": (128, 256), "wide": (64, 384), "padded": (48, 192), "short": (40, 64)}
    layers = {name: nibbles(*shape, group=64, transposed=transposed) for name, shape in shapes.items()}
    for name, weight in read(settings, **layers).items():
        assert np.array_equal(weight, layers[name][1]), name


def test_a_square_matrix_is_not_guessed() -> None:
    with pytest.raises(CheckpointError, match=r"a\.qweight.*is square, as all are: nothing says whether its rows are"):
        read(GPTQ8, a=nk(64, 64))
    square, other = nk(64, 64), nk(32, 64)
    assert np.array_equal(read(GPTQ8, a=square, b=other)["a"], square[1])
    turned = w8a16(64, 64, groups=2, repacked=True)
    assert np.array_equal(read(GPTQ8, a=turned, b=w8a16(32, 64, repacked=True))["a"], turned[1])


def test_zero_points_that_are_none() -> None:
    parts, weight = nibbles(64, 256, group=64)
    wrong = parts | {".qzeros": parts[".qzeros"] + parts[".scales"] / np.float16(2)}
    with pytest.raises(CheckpointError, match="are not zero points from 0 to 15, times the scales"):
        read({"quant_method": "awq", "bits": 4, "group_size": 64}, a=(wrong, weight))


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
