"""Layers that other packages packed against what these make of them (see golden/make_packers.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmjax.checkpoint.formats.quantized import QuantizedTensor
from llmjax.checkpoint.formats.registry import plain_tensors
from llmjax.checkpoint.safetensors import open_safetensors

GOLDEN = Path(__file__).parent / "golden" / "packers"
MODULE = "model.layers.0.mlp.up_proj"
F32 = np.dtype(np.float32)
TYPES = {
    "awq": "AWQ-4",
    "fp8_blocks": "FP8-F8_E4M3",
    "gptq_3_bits": "GPTQ-3",
    "gptq_4_bits": "GPTQ-4",
    "gptq_4_bits_act_order": "GPTQ-4",
    "gptq_8_bits_one_group": "GPTQ-8",
    "marlin_groups": "Marlin-4",
    "marlin_one_group": "Marlin-4",
    "modelopt_fp8": "ModelOpt-FP8",
    "modelopt_nvfp4": "ModelOpt-NVFP4",
}


def test_all_golden_files_are_there() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.safetensors")) == sorted(TYPES)


@pytest.mark.parametrize("name", TYPES)
def test_what_the_package_dequantizes(name: str, tmp_path: Path, packed: Any, small_tiles: None) -> None:
    path = GOLDEN / f"{name}.safetensors"
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = open_safetensors(path)
    expected = tensors.pop("expected").stored
    settings = json.loads(header["__metadata__"]["quantization_config"])
    plain = plain_tensors(tensors, {"quantization_config": settings}, tmp_path)
    assert set(plain) == {f"{MODULE}.weight"}
    weight = plain[f"{MODULE}.weight"]
    assert isinstance(weight, QuantizedTensor) and weight.type_name == TYPES[name]
    assert weight.shape == expected.shape and expected.std() > 0.01
    assert packed(weight) is not None
    found = weight.read(F32)
    if expected.dtype == np.float16:  # products of codes and scales, rounded
        np.testing.assert_array_equal(found.astype(np.float16), expected)
    else:
        np.testing.assert_array_equal(found, expected)
