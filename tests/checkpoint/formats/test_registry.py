"""Which format is found, and everything that is refused: before a weight is read, in one line that names the tensor."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmjax.checkpoint.formats.quantized import QuantizedTensor
from llmjax.checkpoint.formats.registry import READERS, plain_tensors
from llmjax.checkpoint.safetensors import DTYPES, SafetensorsTensor
from llmjax.errors import CheckpointError
from llmjax.weights.packing import pack

M = "model.layers.0.mlp.up_proj"
FOLDER = Path("/model")
TYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Parts = dict[str, Any]


def i32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


def scales(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.ones(shape, dtype)


NF4 = ".weight.quant_state.bitsandbytes__nf4"


def state(**changes: Any) -> np.ndarray:
    found = {"quant_type": "nf4", "blocksize": 64, "shape": [32, 64]} | changes
    return np.frombuffer(json.dumps(found).encode(), np.uint8)


def ct(form: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups} | more


SMOOTH = {"quant_method": "smoothquant", "type": "int8"} | dict.fromkeys(("qkv", "out", "fc1", "fc2"), "per-token")
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
F8 = np.zeros((32, 64), ml_dtypes.float8_e4m3fn)
LAYERS: dict[str, tuple[dict[str, Any], Parts]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
        {
            ".qweight": i32(8, 32),
            ".qzeros": i32(2, 4),
            ".scales": scales(2, 32),
            ".g_idx": np.arange(64, dtype=np.int32) // 32,
        },
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
        {".qweight": i32(64, 4), ".qzeros": i32(2, 4), ".scales": scales(2, 32)},
    ),
    "ct-packed": (
        ct("pack-quantized", W4 | {"symmetric": False}),
        {
            ".weight_packed": i32(32, 8),
            ".weight_scale": scales(32, 2),
            ".weight_zero_point": i32(4, 2),
            ".weight_shape": np.array([32, 64]),
        },
    ),
    "ct-int8": (
        ct("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        {".weight": np.zeros((32, 64), np.int8), ".weight_scale": scales(32, 1)},
    ),
    "ct-fp8": (
        ct("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        {".weight": F8, ".weight_scale": scales(1)},
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [16, 32]},
        {".weight": F8, ".weight_scale_inv": scales(2, 2, dtype=np.float32)},
    ),
    "fp8-tensor": ({"quant_method": "fp8"}, {".weight": F8, ".weight_scale": scales(dtype=np.float32)}),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {
            ".weight": np.zeros((1024, 1), np.uint8),
            ".weight.absmax": scales(32, dtype=np.float32),
            ".weight.quant_map": scales(16, dtype=np.float32),
            NF4: state(),
        },
    ),
    "bnb-int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {".weight": np.zeros((32, 64), np.int8), ".SCB": scales(32, dtype=np.float32)},
    ),
    "mxfp4": (
        {"quant_method": "mxfp4"},
        {"_blocks": np.zeros((32, 2, 16), np.uint8), "_scales": np.zeros((32, 2), np.uint8)},
    ),
    "ct-nvfp4": (
        ct("nvfp4-pack-quantized", FP4),
        {
            ".weight_packed": np.zeros((32, 32), np.uint8),
            ".weight_scale": F8[:, :4],
            ".weight_global_scale": scales(1, dtype=np.float32),
        },
    ),
    "modelopt-fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {".weight": F8, ".weight_scale": scales(dtype=np.float32)},
    ),
    "modelopt-nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {
            ".weight": np.zeros((32, 32), np.uint8),
            ".weight_scale": F8[:, :4],
            ".weight_scale_2": scales(dtype=np.float32),
        },
    ),
    "smoothquant": (
        SMOOTH,
        {".weight": np.zeros((32, 64), np.int8), ".dequant_scale": scales(dtype=np.float32)},
    ),
}


def stored(parts: Parts, module: str = M) -> dict[str, SafetensorsTensor]:
    found = {module + part: array for part, array in parts.items()}
    found["model.norm.weight"] = np.ones(64, np.float32)
    return {
        name: SafetensorsTensor(name, TYPE_NAMES[array.dtype], array.shape, array, FOLDER / "model.safetensors")
        for name, array in found.items()
    }


def open_layer(kind: str, change: Parts | None = None, config: Parts | None = None, module: str = M) -> Any:
    """The layer of a kind, with parts and settings replaced, or removed where None is given."""
    settings, parts = LAYERS[kind]
    parts = {part: array for part, array in (parts | (change or {})).items() if array is not None}
    settings = {key: value for key, value in (settings | (config or {})).items() if value is not None}
    return plain_tensors(stored(parts, module), {"quantization_config": settings}, FOLDER)


def refuse(message: str, *args: Any, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        open_layer(*args, **options)
    assert str(caught.value).startswith(str(FOLDER)) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_whole_layer_opens(kind: str) -> None:
    tensors = open_layer(kind)
    name = M if kind == "mxfp4" else f"{M}.weight"
    assert set(tensors) == {name, "model.norm.weight"}
    assert tensors[name].shape == (32, 64) and tensors[name].read(np.dtype(np.float32)).shape == (32, 64)
    with pytest.raises(CheckpointError, match="cannot be read as int8"):
        tensors[name].read(np.dtype(np.int8))


NAN = np.float32("nan")
NESTED: Parts = {
    ".weight.absmax": np.zeros(32, np.uint8),
    ".weight.nested_absmax": np.ones(1, np.float32),
    ".weight.nested_quant_map": np.full(256, 2, np.float32),
}
NESTED_STATE = state(nested_blocksize=256, nested_offset=0.1)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("gptq", {".scales": None}, f"tensor '{M}.scales' is missing"),
        ("gptq", {".qzeros": None}, r"qzeros' is missing"),
        ("gptq", {".g_idx": None}, r"g_idx' is missing, but desc_act is true"),
        ("gptq", {".g_idx": np.full(64, 2, np.int32)}, "g_idx' names groups 2 to 2, but there are 2"),
        ("gptq", {".g_idx": np.full(64, -1, np.int32)}, "g_idx' names groups -1 to -1"),
        ("gptq", {".g_idx": np.zeros(63, np.int32)}, r"g_idx' has shape \[63\], but 64 inputs needs \[64\]"),
        ("gptq", {".scales": scales(1, 32)}, r"scales' has shape \[1, 32\], but 64 inputs.* needs \[2, 32\]"),
        ("gptq", {".scales": scales(2, 32) * NAN.astype(np.float16)}, "scales' holds scales that are infinite or not"),
        ("gptq", {".qweight": i32(0, 32)}, r"qweight' is empty: its shape is \[0, 32\]"),
        ("gptq", {".qweight": np.zeros((8, 32), np.float32)}, "qweight' is of type F32, not I32"),
        ("gptq", {".qweight": i32(256)}, r"qweight' has shape \[256\], not 2 dimensions"),
        ("gptq", {".qweight": i32(8, 33)}, "which 4-bit codes do not fill"),
        ("gptq", {".weight": scales(32, 64)}, "up_proj.weight' is there twice, once as GPTQ stores it"),
        ("gptq", {".qweight": None}, "belongs to no layer that GPTQ stores"),
        ("awq", {".qzeros": None}, "qzeros' is missing"),
        ("awq", {".scales": scales(2, 32, dtype=np.int32)}, "scales' is of type I32, not BF16 or F16"),
        ("awq", {".qweight": i32(72, 4)}, "72 inputs, not a multiple of the group size 32"),
        ("awq", {".qweight": i32(8, 32)}, "8 inputs, not a multiple of the group size 32"),  # a GPTQ layer
        ("ct-packed", {".weight_scale": None}, "weight_scale' is missing"),
        ("ct-packed", {".weight_zero_point": None}, "weight_zero_point' is missing"),
        ("ct-packed", {".weight_shape": np.array([32, 65])}, "packed' has shape .* but 32 x 65 in 4 bits"),
        ("ct-packed", {".weight_shape": np.array([-1, 64])}, r"weight_shape' is \[-1, 64\]"),
        ("ct-packed", {".weight_scale": scales(32, 4)}, r"scale' has shape \[32, 4\], but .* strategy group needs"),
        ("ct-packed", {".weight_g_idx": np.full(64, 9, np.int32)}, "names groups 9 to 9, but there are 2"),
        ("ct-int8", {".weight_scale": None}, "weight_scale' is missing"),
        ("ct-int8", {".weight_scale": scales(1)}, r"scale' has shape \[1\], but .* strategy channel needs \[32, 1\]"),
        ("ct-int8", {".weight": F8}, "weight' is of type F8_E4M3, not I8"),
        ("ct-int8", {".weight_zero_point": np.ones((32, 1), np.int8)}, "is not 0, but the weights are declared symmet"),
        (
            "fp8",
            {".weight_scale_inv": None},
            "weight' is of FP8 and must have one of weight_scale_inv and weight_scale",
        ),
        ("fp8", {".weight_scale_inv": scales(2, 1)}, r"32 x 64 in blocks of 16 x 32 needs \[2, 2\]"),
        ("fp8", {".weight_scale_inv": scales(2, 2) * np.float16("inf")}, "infinite or not a number"),
        ("fp8", {".weight": scales(32, 64)}, "scale_inv' is of no use to a layer that FP8 does not store"),
        ("fp8-tensor", {".weight_scale": scales(31, 1)}, "fits no scale per tensor, row or group of 32 x 64"),
        ("nf4", {".weight.absmax": None}, "absmax' is missing"),
        ("nf4", {".weight": np.zeros((1000, 1), np.uint8)}, r"has 1000 bytes, but \[32, 64\] in 4 bits needs 1024"),
        ("nf4", {NF4: None}, "quant_state.bitsandbytes__nf4' is missing"),
        ("nf4", {NF4: np.frombuffer(b"{", np.uint8)}, "nf4' is not valid JSON"),
        ("nf4", {NF4: np.frombuffer(b"[" * 100000, np.uint8)}, "nf4' is not valid JSON"),
        ("nf4", {NF4: np.frombuffer(b"[]", np.uint8)}, "nf4' is not a JSON object"),
        ("nf4", {NF4: state(shape=[32, 0])}, "nf4': shape is .* not two sizes"),
        ("nf4", {NF4: state(blocksize=0)}, "nf4': blocksize is 0, not an even number"),
        ("nf4", {NF4: state(nested_blocksize=256)}, "absmax' is of type F32, not U8"),
        ("nf4", {".weight.quant_map": scales(8, dtype=np.float32)}, r"quant_map' has shape \[8\]"),
        ("bnb-int8", {".SCB": None}, "SCB' is missing"),
        ("bnb-int8", {".weight_format": np.array(1, np.uint8)}, "weight_format' says another order than row"),
        ("mxfp4", {"_scales": np.full((32, 2), 255, np.uint8)}, "_scales' holds scales that are not a number"),
        ("mxfp4", {"_blocks": np.zeros((32, 2, 8), np.uint8)}, r"not \[..., out, groups, 16\]"),
        ("mxfp4", {"_blocks": None}, "_blocks' is missing"),
        ("smoothquant", {".dequant_scale": None}, "dequant_scale' is missing"),
        ("gptq", {".scales": np.full((2, 32), 1e300)}, "scales' holds scales that are infinite"),  # in float32
        ("nf4", {".weight.quant_map": np.full(16, NAN)}, "quant_map' holds scales that are infinite or not a number"),
        ("nf4", NESTED | {NF4: state(nested_blocksize=0, nested_offset=0.1)}, "nested_blocksize is 0, not a number of"),
        ("nf4", NESTED | {NF4: state(nested_blocksize=256, nested_offset=NAN.item())}, "nested_offset is 'nan'"),
        (
            "nf4",
            NESTED | {".weight.nested_absmax": np.full(1, 3e38, np.float32), NF4: NESTED_STATE},
            "nested_absmax' holds scales that are infinite or not a number",
        ),
        ("ct-nvfp4", {".weight_global_scale": None}, "weight_global_scale' is missing"),
        ("ct-nvfp4", {".weight_global_scale": np.zeros(1, np.float32)}, "global_scale' holds scales that are infinite"),
        ("ct-nvfp4", {".weight_scale": F8[:, :3]}, r"scale' has shape \[32, 3\], but groups of 16 needs \[32, 4\]"),
        (
            "ct-nvfp4",
            {".weight_scale": F8[:, :4] * NAN.astype(F8.dtype)},
            "weight_scale' holds scales that are infinite",
        ),
        ("modelopt-nvfp4", {".weight_scale_2": scales(2)}, r"scale_2' has shape \[2\], not one scale for the tensor"),
        ("modelopt-nvfp4", {".weight": np.zeros((32, 30), np.uint8)}, "has 60 columns, not a multiple of 16"),
        ("modelopt-fp8", {".weight_scale": None}, "weight_scale' is missing"),
        ("smoothquant", {".quant_scale": scales()}, "quant_scale' is not expected"),
    ],
)
def test_tensors_that_do_not_fit(kind: str, change: Parts, message: str) -> None:
    refuse(message, kind, change)


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("gptq", {"bits": 5}, "quantization_config: bits is 5; supported are 2, 3, 4, 8"),
        ("gptq", {"bits": None}, "bits is missing"),
        ("gptq", {"bits": 8}, "g_idx.* 32 inputs|scales' has shape"),
        ("gptq", {"bits": "4"}, "bits is '4', not a whole number"),
        ("gptq", {"bits": True}, "bits is 'True', not a whole number"),
        ("gptq", {"group_size": 0}, "group_size is 0, neither -1 nor a number of columns"),
        ("gptq", {"group_size": -2}, "group_size is -2"),
        ("gptq", {"group_size": 2**70}, "group_size is 1180591620717411303424, out of any range"),
        (
            "gptq",
            {"sym": True},
            "qzeros' has zero points 1 to 1, but sym is true.* is checkpoint_format gptq_v2 rather",
        ),
        (
            "gptq",
            {"checkpoint_format": "marlin", "sym": True, "desc_act": False},
            "declared to be quantized with Marlin, but no tensor is stored so",
        ),
        ("gptq", {"checkpoint_format": "marlin_24"}, "is 'marlin_24'; supported are gptq and gptq_v2"),
        ("gptq", {"checkpoint_format": "bitblas"}, "is 'bitblas'; supported are gptq and gptq_v2"),
        ("gptq", {"pack_dtype": "int16"}, "pack_dtype is 'int16'; supported are int32"),
        ("gptq", {"quant_method": "gptq_marlin"}, "Marlin kernel; load the GPTQ or AWQ checkpoint that they were made"),
        (
            "gptq",
            {"quant_method": "quip"},
            "quant_method is 'quip'; supported are gptq, marlin, awq, compressed-tensors",
        ),
        ("gptq", {"quant_method": 3}, "quant_method is '3', not a string"),
        ("gptq", {"quant_method": None, "desc_act": None}, "quant_method is missing"),
        ("awq", {"version": "gemv"}, "version is 'gemv', a layout .* load the checkpoint's GEMM version"),
        ("awq", {"bits": 8}, "bits is 8; supported are 4"),
        ("awq", {"zero_point": False}, "zero_point is false"),
        ("ct-packed", {"format": "marlin-24"}, "format is 'marlin-24'; supported are"),
        ("ct-packed", {"config_groups": {}}, "config_groups is missing or empty"),
        ("ct-packed", {"config_groups": {"group_0": {}}}, "config_groups: group_0 has no weights"),
        ("ct-packed", ct("pack-quantized", W4 | {"strategy": "token"}), "strategy is 'token'; supported"),
        (
            "ct-packed",
            ct("pack-quantized", W4 | {"num_bits": 8, "symmetric": False}),
            r"packed' has shape .* in 8 bits",
        ),
        ("ct-packed", ct("pack-quantized", W4 | {"group_size": 0}), "group_size is 0"),
        (
            "ct-packed",
            ct("pack-quantized", W4 | {"group_size": 48, "symmetric": False}),
            "multiple of the group size 48",
        ),
        ("ct-packed", ct("pack-quantized", W4 | {"type": "float"}), "type does not go with format pack-quantized"),
        ("ct-packed", ct("int-quantized", {"num_bits": 8, "strategy": "channel"}), "weight' is missing"),
        ("ct-packed", {"ignore": [M]}, "is quantized, but the module is on the ignore list"),
        ("ct-packed", {"ignore": 1}, "ignore is not a list of names"),
        ("ct-packed", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: format is 'sparse-24"),
        ("ct-packed", {"transform_config": {"a": 1}}, "transformed weights are not supported"),
        ("fp8", {"weight_block_size": [128]}, "not two sizes"),
        ("fp8", {"weight_block_size": [0, 128]}, "not two sizes"),
        ("fp8", {"weight_block_size": [2**70, 128]}, "not two sizes"),
        ("fp8", {"fmt": "e3m4"}, "fmt is 'e3m4'"),
        ("nf4", {"load_in_8bit": True}, "load_in_4bit or load_in_8bit must be true, and not both"),
        ("nf4", {"bnb_4bit_quant_type": "fp4"}, "quant_state.bitsandbytes__fp4' is missing"),
        ("smoothquant", {"out": "per-row"}, "out is 'per-row'"),
        ("modelopt-fp8", {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'w4a8_awq'; supported are fp8, fp8_per_channel"),
        ("modelopt-nvfp4", {"group_size": 32}, "group_size is 32; supported are 16"),
        ("ct-nvfp4", ct("nvfp4-pack-quantized", FP4 | {"group_size": 32}), "group_size is 32, which does not go with"),
        ("ct-nvfp4", ct("nvfp4-pack-quantized", FP4 | {"symmetric": False}), "symmetric is false, which does not go"),
        ("ct-nvfp4", ct("nvfp4-pack-quantized", FP4 | {"strategy": "group"}), "strategy is group, which does not go"),
        ("ct-packed", ct("pack-quantized", W4 | {"strategy": "tensor_group"}), "strategy is tensor_group, which does"),
    ],
)
def test_settings_that_do_not_fit(kind: str, config: Parts, message: str) -> None:
    refuse(message, kind, config=config)


def test_smoothquant_needs_the_input_scale_of_a_layer_behind_no_norm() -> None:
    module = "model.layers.0.self_attn.o_proj"
    refuse("quant_scale' is missing", "smoothquant", config={"out": "per-tensor"}, module=module)
    scale = np.array(4.0, np.float32)
    tensors = open_layer(
        "smoothquant",
        {".weight": np.ones((32, 64), np.int8), ".quant_scale": scale},
        config={"out": "per-tensor"},
        module=module,
    )
    assert (tensors[f"{module}.weight"].read(np.dtype(np.float32)) == 0.25).all()
    zero = {".quant_scale": np.array(0, np.float32)}
    refuse("not a single number other than 0", "smoothquant", zero, config={"out": "per-tensor"}, module=module)
    tiny = {".quant_scale": np.array(1e-44, np.float32)}
    refuse("quant_scale' holds scales that are", "smoothquant", tiny, config={"out": "per-tensor"}, module=module)


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind not in ("mxfp4",)])
def test_quantized_tensors_that_nothing_declares(kind: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"is part of a quantized layer, but config.json has no quantization_conf"
    ):
        plain_tensors(stored(LAYERS[kind][1]), {"quantization_config": {}}, FOLDER)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_declaration_without_such_tensors(kind: str) -> None:
    plain = stored({".weight": np.ones((2, 2), np.float32)})
    with pytest.raises(CheckpointError, match=r"is declared to be quantized with .*, but no tensor is stored so"):
        plain_tensors(plain, {"quantization_config": LAYERS[kind][0]}, FOLDER)


@pytest.mark.parametrize("kind", ["gptq", "awq", "ct-packed", "bnb-int8"])
def test_reading_needs_little_memory_besides_the_result(kind: str) -> None:
    outputs, inputs = 2048, 2048
    grow = {".weight_shape": np.array([outputs, inputs])} if kind == "ct-packed" else {}
    for part, array in LAYERS[kind][1].items():
        if part not in grow and part != ".g_idx":
            shape = [size * (outputs // 32 if size in (32, 4) else inputs // 64) for size in array.shape]
            grow[part] = np.zeros(shape, array.dtype)
    change = grow | ({".g_idx": None} if kind == "gptq" else {})
    tensor = open_layer(kind, change, {"desc_act": False} if kind == "gptq" else None)[f"{M}.weight"]
    assert tensor.shape == (outputs, inputs)
    tracemalloc.start()
    result = tensor.read(np.dtype(np.float16))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < result.nbytes + 3 * 2**20


@pytest.mark.parametrize(
    ("kind", "change", "problem"),
    [
        ("gptq", {".g_idx": np.array([0] * 31 + [1] * 33, np.int32)}, "its groups of columns have sizes from 31 to 33"),
        ("ct-packed", {".weight_g_idx": np.array([0] * 16 + [1] * 48, np.int32)}, "have sizes from 16 to 48"),
    ],
)
def test_what_cannot_stay_quantized_is_said(
    kind: str, change: Parts, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tensor,) = (tensor for tensor in open_layer(kind, change).values() if isinstance(tensor, QuantizedTensor))
    assert tensor.row_source() is None
    assert tensor.read(np.dtype(np.float32)).shape == tensor.shape
    (record,) = caplog.records
    assert record.levelname == "WARNING" and f"tensor {tensor.name!r}" in record.message and problem in record.message


def test_zero_points_that_are_all_equal_are_a_constant() -> None:
    tensor = open_layer("gptq")[f"{M}.weight"]
    assert tensor.row_source().format.zero == 1  # version 1 stores 0
    mixed = i32(2, 4)
    mixed[1, 3] = 7
    assert open_layer("gptq", {".qzeros": mixed})[f"{M}.weight"].row_source().format.zero == "u8"


def test_packing_needs_little_memory_besides_the_result() -> None:
    change = {".weight": np.zeros((2048, 2048), np.int8), ".weight_scale": scales(2048, 1)}
    source = open_layer("ct-int8", change)[f"{M}.weight"].row_source()
    tracemalloc.start()
    words = pack(source, tile=16)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert words.nbytes == 2048 * (2048 + 4) and peak < words.nbytes + (os.cpu_count() or 1) * 2**21


def test_plain_checkpoints_stay_as_they_are() -> None:
    plain = stored({".weight": np.ones((2, 2), np.float32)})
    assert plain_tensors(plain, {}, FOLDER) is plain
    dense = {"quant_method": "compressed-tensors", "format": "dense", "kv_cache_scheme": {"num_bits": 8}}
    assert plain_tensors(plain, {"quantization_config": dense}, FOLDER) is plain


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_malformed_settings_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"quantize_config.json: is not (valid JSON|a JSON object)"):
        plain_tensors(stored({}), {}, tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


def opens_or_refuses(act: Callable[[], Any]) -> None:
    """Whatever is wrong is one line of CheckpointError; what opens can be read."""
    try:
        tensors = act()
    except CheckpointError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return
    for tensor in tensors.values():
        if isinstance(tensor, QuantizedTensor):
            assert tensor.read(np.dtype(np.float32)).shape == tensor.shape
            source = tensor.row_source()
            if source is not None:
                assert pack(source, tile=16).shape == (-(-tensor.shape[0] // 16), source.format.num_words, 16)


@pytest.mark.parametrize("kind", LAYERS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_settings(kind: str, data: st.DataObject) -> None:
    base = LAYERS[kind][0]
    target = base
    if "config_groups" in base and data.draw(st.booleans()):
        target = base["config_groups"]["group_0"]["weights"]
    keys = [
        *target,
        "ignore",
        "dynamic",
        "sym",
        "format",
        "checkpoint_format",
        "group_size",
        "symmetric",
        "sparsity_config",
    ]
    change = data.draw(st.dictionaries(st.sampled_from(keys), JSON | st.sampled_from(list(READERS)), max_size=3))
    changed = target | change
    config = changed if target is base else ct(base["format"], changed)
    opens_or_refuses(lambda: plain_tensors(stored(LAYERS[kind][1]), {"quantization_config": config}, FOLDER))


@pytest.mark.parametrize("kind", LAYERS)
@settings(max_examples=60)
@given(data=st.data())
def test_any_shapes_and_types(kind: str, data: st.DataObject) -> None:
    parts = dict(LAYERS[kind][1])
    for part in data.draw(st.lists(st.sampled_from(list(parts)), max_size=2)):
        shape = list(parts[part].shape)
        one_size: bool = data.draw(st.booleans())
        if shape and one_size:
            shape[data.draw(st.integers(0, len(shape) - 1))] = data.draw(st.sampled_from([0, 1, 2, 7, 32, 33, 64]))
        else:
            shape = data.draw(st.lists(st.sampled_from([0, 1, 2, 32]), max_size=4))
        dtype = data.draw(st.sampled_from([parts[part].dtype, np.dtype(np.int32), np.dtype(np.float32)]))
        fill = data.draw(st.integers(0, 255))
        parts[part] = np.full(shape, fill, np.uint8).astype(dtype)
    opens_or_refuses(lambda: plain_tensors(stored(parts), {"quantization_config": LAYERS[kind][0]}, FOLDER))
