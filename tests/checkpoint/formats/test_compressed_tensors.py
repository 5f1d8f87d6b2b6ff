"""compressed-tensors layers against what the package itself makes of them (see golden/make_compressed_tensors.py)."""

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
from llmjax.checkpoint.safetensors import SafetensorsTensor, open_safetensors

GOLDEN = Path(__file__).parent / "golden" / "compressed_tensors"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.safetensors"))
MODULE = "model.layers.0.mlp.up_proj"
BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


def golden(name: str) -> tuple[dict[str, SafetensorsTensor], dict[str, Any]]:
    path = GOLDEN / f"{name}.safetensors"
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return open_safetensors(path), json.loads(header["__metadata__"]["quantization_config"])


def test_all_golden_files_are_there() -> None:
    assert len(NAMES) == 18


@pytest.mark.parametrize("name", NAMES)
def test_what_the_package_decompresses(name: str, tmp_path: Path, packed: Any, small_tiles: None) -> None:
    tensors, settings = golden(name)
    expected = tensors.pop("expected").stored
    for key in ("quantization_config", "compression_config"):
        plain = plain_tensors(tensors, {key: settings}, tmp_path)
        assert set(plain) == {f"{MODULE}.weight"}
        weight = plain[f"{MODULE}.weight"]
        assert isinstance(weight, QuantizedTensor) and weight.type_name.startswith("CT-")
        assert weight.nbytes == sum(tensor.nbytes for tensor in tensors.values())
        assert np.array_equal(weight.read(BF16), expected)
    assert packed(weight) is not None
    # A number that bfloat16 rounds is the only thing that may differ in float32.
    assert np.allclose(weight.read(F32), expected.astype(np.float32), rtol=2**-8, atol=0)


def test_columns_in_groups_of_their_own(tmp_path: Path, packed: Any) -> None:
    tensors, settings = golden("w4_asym")
    plain = plain_tensors(tensors, {"quantization_config": settings}, tmp_path)[f"{MODULE}.weight"].read(F32)
    order = np.random.default_rng(0).permutation(128)
    group_of = (np.arange(128) // 64)[order].astype(np.int32)
    name = f"{MODULE}.weight_g_idx"
    tensors[name] = SafetensorsTensor(name, "I32", group_of.shape, group_of, tmp_path)
    weight = plain_tensors(tensors, {"quantization_config": settings}, tmp_path)[f"{MODULE}.weight"]
    found, records = weight.read(F32), packed(weight)
    assert np.array_equal(records.columns, np.argsort(group_of, kind="stable"))
    kept = group_of == np.arange(128) // 64
    assert np.array_equal(found[:, kept], plain[:, kept]) and not np.array_equal(found, plain)
    unset = np.full(128, -1, np.int32)
    tensors[name] = SafetensorsTensor(name, "I32", unset.shape, unset, tmp_path)
    found = plain_tensors(tensors, {"quantization_config": settings}, tmp_path)[f"{MODULE}.weight"].read(F32)
    assert np.array_equal(found, plain)


def test_several_groups(tmp_path: Path) -> None:
    first, settings = golden("w4_group")
    second, other = golden("fp8_channel")
    both = {name.replace("up_proj", "down_proj"): tensor for name, tensor in second.items()} | first
    settings["config_groups"]["group_1"] = other["config_groups"]["group_0"]
    settings["format"] = "mixed-precision"
    plain = plain_tensors(both, {"quantization_config": settings}, tmp_path)
    assert plain[f"{MODULE}.weight"].type_name == "CT-INT4"
    assert np.array_equal(plain["model.layers.0.mlp.down_proj.weight"].read(BF16), second["expected"].stored)


def pack_int8(outputs: int, inputs: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (outputs, inputs)).astype(np.int8)
    scales = rng.random((outputs, 1)).astype(np.float32)
    return {".weight": codes, ".weight_scale": scales}, codes.astype(np.float32) * scales


@pytest.mark.parametrize("dynamic", [True, False])
def test_w8a8_says_whose_scales_activations_are_rounded_with(
    dynamic: bool, check_model: Callable[..., Checkpoint], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "llmjax")
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": dynamic},
    }
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}

    def pack(outputs: int, inputs: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        parts, weight = pack_int8(outputs, inputs)
        return parts | ({} if dynamic else {".input_scale": np.ones(1, np.float32)}), weight

    check_model(pack, settings)
    assert "round activations of compressed-tensors layers with scales of their own, which are not used" in caplog.text


def pack_w4a16(outputs: int, inputs: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Signed codes and zero points plus 8, eight a word: codes along in, zero points along out."""
    rng = np.random.default_rng(0)
    codes, zeros = rng.integers(0, 16, (outputs, inputs)), rng.integers(5, 11, (outputs, inputs // 32))
    scales = (rng.random(zeros.shape) * 0.02 + 0.01).astype(ml_dtypes.bfloat16)
    nibbles = 4 * np.arange(8)
    words = (codes.reshape(outputs, -1, 8) << nibbles).sum(-1).astype(np.uint32).view(np.int32)
    columns = (zeros.T.reshape(inputs // 32, -1, 8) << nibbles).sum(-1).astype(np.uint32).view(np.int32).T
    parts = {
        ".weight_packed": words,
        ".weight_zero_point": np.ascontiguousarray(columns),
        ".weight_scale": scales,
        ".weight_shape": np.array([outputs, inputs]),
    }
    weight = (codes - zeros.repeat(32, axis=1)).astype(np.float32) * scales.astype(np.float32).repeat(32, axis=1)
    return parts, weight


@pytest.mark.parametrize("bits", [4, 8])
def test_logits(bits: int, check_model: Callable[..., Checkpoint], check_logits: Callable) -> None:
    weights: dict[str, Any] = {"num_bits": bits, "type": "int"}
    weights |= {"strategy": "group", "group_size": 32, "symmetric": False} if bits == 4 else {"strategy": "channel"}
    form = "pack-quantized" if bits == 4 else "int-quantized"
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    check_logits(check_model(pack_w4a16 if bits == 4 else pack_int8, settings))
