"""bitsandbytes and MXFP4 layers packed code by code, and golden ones (see golden/make_bitsandbytes.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmjax.checkpoint import Checkpoint
from llmjax.checkpoint.formats.quantized import QuantizedTensor
from llmjax.checkpoint.formats.registry import plain_tensors
from llmjax.checkpoint.safetensors import DTYPES, SafetensorsTensor, open_safetensors

GOLDEN = Path(__file__).parent / "golden" / "bitsandbytes"
Packed = tuple[dict[str, np.ndarray], np.ndarray]

NF4 = [-1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1]
FP4 = [value / 12 for value in (0, 0.0625, 8, 12, 4, 6, 2, 3)]
FP4 += [-value for value in FP4]


def four_bit_packer(
    kind: str,
    blocksize: int,
    *,
    nested: int = 0,
    storage: Any = np.uint8,
    absmaxes: tuple[float, ...] = (0.0, 1.0, 0.3, 1e38, 1e-42),
) -> Callable[[int, int], Packed]:
    rng = np.random.default_rng(blocksize)
    levels = np.array(NF4 if kind == "nf4" else FP4, np.float32)

    def pack(outputs: int, inputs: int) -> Packed:
        codes = rng.integers(0, 16, outputs * inputs)
        packed = np.array([codes[k] << 4 | codes[k + 1] for k in range(0, len(codes), 2)], np.uint8)
        blocks = -(-len(codes) // blocksize)
        state = {"quant_type": kind, "blocksize": blocksize, "dtype": "bfloat16", "shape": [outputs, inputs]}
        parts = {".weight": packed.view(storage)[:, None], ".weight.quant_map": levels}
        if nested:
            table = rng.standard_normal(256).astype(np.float32)
            stored = rng.integers(0, 256, blocks).astype(np.uint8)
            outer = rng.random(-(-blocks // nested)).astype(np.float32)
            offset = np.float32(0.0376)
            absmax = np.array([table[stored[b]] * outer[b // nested] + offset for b in range(blocks)], np.float32)
            state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": float(offset)}
            parts |= {".weight.absmax": stored, ".weight.nested_quant_map": table, ".weight.nested_absmax": outer}
        else:
            absmax = rng.choice(np.array(absmaxes, np.float32), blocks)
            parts[".weight.absmax"] = absmax
        weight = np.array([levels[code] * absmax[k // blocksize] for k, code in enumerate(codes)], np.float32)
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        return parts | {f".weight.quant_state.bitsandbytes__{kind}": text}, weight.reshape(outputs, inputs)

    return pack


def settings(kind: str) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": kind,
        "_load_in_4bit": True,
    }


@pytest.mark.parametrize("blocksize", [32, 64, 128, 256])  # rows of 64 and 96 do not all hold whole blocks
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits(kind: str, blocksize: int, check_model: Callable[..., Checkpoint], small_tiles: None) -> None:
    check_model(four_bit_packer(kind, blocksize), settings(kind))


@pytest.mark.parametrize("storage", [np.uint8, ml_dtypes.bfloat16])
@pytest.mark.parametrize("nested", [8, 256])
def test_double_quantization(
    nested: int, storage: Any, check_model: Callable[..., Checkpoint], small_tiles: None
) -> None:
    check_model(four_bit_packer("nf4", 64, nested=nested, storage=storage), settings("nf4"))


def pack_int8(outputs: int, inputs: int) -> Packed:
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    scales = rng.random(outputs).astype(np.float32) * 10
    weight = codes.astype(np.float32) * (scales / np.float32(127))[:, None]
    return {".weight": codes, ".SCB": scales, ".weight_format": np.array(0, np.uint8)}, weight


def test_eight_bits(check_model: Callable[..., Checkpoint]) -> None:
    check_model(pack_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False})


@pytest.mark.parametrize("name", ["nf4", "nf4_nested", "fp4_nested", "int8"])
def test_what_the_package_dequantizes(name: str, small_tiles: None) -> None:
    tensors = open_safetensors(GOLDEN / f"{name}.safetensors")
    expected = tensors.pop("expected").stored
    config = settings(name[:3]) if name != "int8" else {"quant_method": "bitsandbytes", "load_in_8bit": True}
    plain = plain_tensors(tensors, {"quantization_config": config}, GOLDEN)
    weight = plain["model.layers.0.mlp.up_proj.weight"].read(np.dtype(np.float32))
    if name == "int8":  # the package multiplies by 1 / 127 at the end, which may round otherwise
        assert np.allclose(weight, expected, rtol=2.5e-7, atol=0)
    else:
        assert np.array_equal(weight, expected)


def mxfp4(code: int, exponent: int) -> float:
    magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code & 7]
    return (-magnitude if code & 8 else magnitude) * 2.0 ** (exponent - 127)


@pytest.mark.parametrize("scale_type", ["U8", "F8_E8M0"])
@pytest.mark.parametrize("experts", [0, 3])
def test_mxfp4(
    experts: int, scale_type: str, tmp_path: Path, same: Callable[..., bool], packed: Any, small_tiles: None
) -> None:
    rng = np.random.default_rng(0)
    outer = (experts, 6) if experts else (6,)
    blocks = rng.integers(0, 256, (*outer, 2, 16), np.uint8)
    scales = rng.choice(np.array([0, 1, 100, 127, 252], np.uint8), (*outer, 2))
    weight = np.empty((*outer, 64), np.float32)
    for place in np.ndindex(*outer, 64):
        *row, column = place
        byte = blocks[(*row, column // 32, column % 32 // 2)]
        weight[place] = mxfp4(int(byte >> 4 if column % 2 else byte & 15), int(scales[(*row, column // 32)]))
    stored = {
        name: SafetensorsTensor(name, kind, array.shape, array.view(DTYPES[kind]), tmp_path)
        for name, kind, array in (("mlp.w_blocks", "U8", blocks), ("mlp.w_scales", scale_type, scales))
    }
    tensors = plain_tensors(stored, {"quantization_config": {"quant_method": "mxfp4"}}, tmp_path)
    tensor = tensors["mlp.w"]
    assert isinstance(tensor, QuantizedTensor) and tensor.nbytes == blocks.nbytes + scales.nbytes
    assert tensor.shape == weight.shape
    assert same(tensor.read(np.dtype(np.float32)), weight)
    scales[scales == 0] = 1  # XLA takes the scale 2^-127 for 0
    matrices = [tensor.matrix(i, slice(0, 6), f"{i}") for i in range(experts)] or [tensor]
    assert all(packed(matrix).shape == (6, 64) for matrix in matrices)


def nvfp4_packer(outputs: int, inputs: int) -> Packed:
    """ModelOpt's layers."""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (outputs, inputs // 2), np.uint8)
    scales = rng.choice(np.array([0.0, 2.0**-9, 1.0, 1.125, 30.0], np.float32), (outputs, inputs // 16))
    whole = np.float32(0.0123)
    weight = np.empty((outputs, inputs), np.float32)
    for o, i in np.ndindex(outputs, inputs):
        code = int(data[o, i // 2] >> 4 if i % 2 else data[o, i // 2] & 15)
        weight[o, i] = np.float32(mxfp4(code, 127)) * (scales[o, i // 16] * whole)
    parts = {
        ".weight": data,
        ".weight_scale": scales.astype(ml_dtypes.float8_e4m3fn),
        ".weight_scale_2": np.array(whole),
    }
    return parts | {".input_scale": np.array(1, np.float32)}, weight


@pytest.mark.parametrize("file", [None, "hf_quant_config.json"])
def test_nvfp4(file: str | None, check_model: Callable[..., Checkpoint], check_logits: Callable) -> None:
    inner = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None}
    config = {"quantization": inner} if file else inner | {"quant_method": "modelopt"}
    checkpoint = check_model(nvfp4_packer, config, file=file)
    assert checkpoint.tensors["model.layers.0.mlp.up_proj.weight"].type_name == "ModelOpt-NVFP4"
    if file:
        check_logits(checkpoint)


def mxfp4_packer(outputs: int, inputs: int) -> Packed:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (outputs, inputs // 32, 16), np.uint8)
    scales = rng.integers(120, 125, (outputs, inputs // 32), np.uint8)
    weight = np.empty((outputs, inputs), np.float32)
    for o, i in np.ndindex(outputs, inputs):
        byte = int(blocks[o, i // 32, i % 32 // 2])
        weight[o, i] = mxfp4(byte >> 4 if i % 2 else byte & 15, int(scales[o, i // 32]))
    return {".weight_blocks": blocks, ".weight_scales": scales}, weight


def test_logits_of_mxfp4(check_model: Callable[..., Checkpoint], check_logits: Callable) -> None:
    check_logits(check_model(mxfp4_packer, {"quant_method": "mxfp4"}))


def test_logits_of_four_bits(check_model: Callable[..., Checkpoint], check_logits: Callable) -> None:
    layers = four_bit_packer("nf4", 64, absmaxes=(0.1, 0.2, 0.3))
    check_logits(check_model(layers, settings("nf4")))


def test_logits_of_eight_bits(check_model: Callable[..., Checkpoint], check_logits: Callable) -> None:
    checkpoint = check_model(pack_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    check_logits(checkpoint)
