"""FP8 and SmoothQuant layers: one byte a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmjax.checkpoint import Checkpoint

Packed = tuple[dict[str, np.ndarray], np.ndarray]
E4M3 = ml_dtypes.float8_e4m3fn


def e4m3(code: int) -> float:
    """Sign, 4 bits of exponent with bias 7, 3 of mantissa; S.1111.111 is not a number, nothing is infinite."""
    sign, exponent, mantissa = (-1) ** (code >> 7), code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (2.0**-9 * mantissa if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8))


VALUES = np.array([e4m3(code) for code in range(256)], np.float32)
VALUES[0x80] = -0.0
SCALES = np.array([0.01, 0.0, -0.0, 1e30, 1e-42], np.float32)


def fp8_packer(
    part: str, block: tuple[int, int] | str, *, scales_of: np.ndarray = SCALES, codes_of: int = 256
) -> Callable[[int, int], Packed]:
    rng = np.random.default_rng(0)

    def pack(outputs: int, inputs: int) -> Packed:
        codes = rng.integers(0, codes_of, (outputs, inputs), np.uint8)
        rows, columns = {"tensor": (outputs, inputs), "row": (1, inputs)}.get(block, block)  # type: ignore[arg-type]
        scales = rng.choice(scales_of, (-(-outputs // rows), -(-inputs // columns)))
        weight = np.empty((outputs, inputs), np.float32)
        for o in range(outputs):
            for i in range(inputs):
                weight[o, i] = VALUES[codes[o, i]] * np.float32(scales[o // rows, i // columns])
        parts = {".weight": codes.view(E4M3), part: scales.reshape(()) if block == "tensor" else scales}
        return parts | {".input_scale": np.array(0.5, np.float32)}, weight

    return pack


@pytest.mark.parametrize("block", [[128, 128], [32, 16], [40, 24]])
def test_blocks(
    block: list[int], check_model: Callable[..., Checkpoint], small_tiles: None, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block, "activation_scheme": "dynamic"}
    odd = block[1] % 16 > 0
    check_model(fp8_packer(".weight_scale_inv", (block[0], block[1])), settings, records=not odd)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == odd * [
        f"tensor 'model.layers.0.mlp.{name}_proj.weight' of type FP8-F8_E4M3 is dequantized: "
        "its groups of 24 columns are not a multiple of 16"
        for name in ("up", "down")
    ]


def test_scales_that_are_powers_of_two(check_model: Callable[..., Checkpoint]) -> None:
    scales = np.array([2.0**-20, 0.5, 1, 8], ml_dtypes.float8_e8m0fnu)
    settings = {"quant_method": "fp8", "weight_block_size": [32, 16], "scale_fmt": "ue8m0"}
    check_model(fp8_packer(".weight_scale_inv", (32, 16), scales_of=scales, codes_of=127), settings)


@pytest.mark.parametrize(
    ("method", "part", "kind"),
    [
        ("fp8", ".weight_scale", "tensor"),
        ("fp8", ".weight_scale_inv", "tensor"),
        ("fbgemm_fp8", ".weight_scale", "row"),
    ],
)
def test_tensors_and_rows(
    method: str, part: str, kind: str, check_model: Callable[..., Checkpoint], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "llmjax")
    checkpoint = check_model(fp8_packer(part, kind), {"quant_method": method, "activation_scheme": "static"})
    assert checkpoint.tensors["model.layers.0.mlp.up_proj.weight"].type_name == "FP8-F8_E4M3"
    assert [record.message for record in caplog.records] == [
        f"{checkpoint.path}: its makers round activations of FP8 layers with scales of their own, which are not used; "
        "products round them as the setting `activations` says"
    ]


def smooth_packer(kinds: dict[str, str]) -> Callable[[int, int], Packed]:
    """Layers of 32 outputs by turns of the names that `check_model` goes through: k, o, q, v … are told by shape."""
    rng = np.random.default_rng(1)

    def pack(outputs: int, inputs: int) -> Packed:
        codes = rng.integers(-128, 128, (outputs, inputs)).astype(np.int8)
        dequant, quant = np.float32(rng.random() * 0.01), np.float32(rng.random() + 0.5)
        fixed = kinds["fc2"] == "per-tensor" and inputs == 96  # down_proj alone has 96 inputs
        scale = dequant / quant if fixed else dequant
        parts: dict[str, np.ndarray] = {".weight": codes, ".dequant_scale": np.array(dequant)}
        return parts | ({".quant_scale": np.array(quant)} if fixed else {}), codes.astype(np.float32) * scale

    return pack


@pytest.mark.parametrize("fixed", [[], ["qkv", "fc1"], ["fc2"]])
def test_smoothquant(fixed: list[str], check_model: Callable[..., Checkpoint]) -> None:
    kinds: dict[str, Any] = {
        name: "per-tensor" if name in fixed else "per-token" for name in ("qkv", "out", "fc1", "fc2")
    }
    check_model(smooth_packer(kinds), kinds | {"type": "int8"}, file="quant_config.json")


def test_smoothquant_of_type_fp8(check_model: Callable[..., Checkpoint]) -> None:
    kinds = dict.fromkeys(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), "per-token")
    check_model(fp8_packer(".weight_scale", "tensor"), kinds | {"type": "fp8"}, file="quant_config.json")


def test_modelopt_fp8(check_model: Callable[..., Checkpoint]) -> None:
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    checkpoint = check_model(fp8_packer(".weight_scale", "tensor"), settings, file="hf_quant_config.json")
    assert checkpoint.tensors["model.layers.0.mlp.up_proj.weight"].type_name == "ModelOpt-FP8"


@pytest.mark.parametrize(("part", "block"), [(".weight_scale_inv", (32, 32)), (".weight_scale", "row")])
def test_logits(part: str, block: Any, check_model: Callable[..., Checkpoint], check_logits: Callable) -> None:
    layers = fp8_packer(part, block, scales_of=np.array([0.1, -0.2, 0.15], np.float32), codes_of=64)
    settings = {"quant_method": "fp8"} | ({"weight_block_size": list(block)} if block != "row" else {})
    check_logits(check_model(layers, settings))


def test_logits_of_smoothquant(check_model: Callable[..., Checkpoint], check_logits: Callable) -> None:
    kinds: dict[str, Any] = dict.fromkeys(("qkv", "out", "fc1"), "per-token") | {"fc2": "per-tensor"}
    check_logits(check_model(smooth_packer(kinds), kinds | {"type": "int8"}, file="quant_config.json"))
