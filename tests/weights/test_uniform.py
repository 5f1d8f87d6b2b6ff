"""Integers and float8 against what the compressed-tensors package computes (see golden/make_uniform.py)."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from llmjax.checkpoint.safetensors import open_safetensors
from llmjax.errors import CheckpointError
from llmjax.weights.uniform import SAVED_SCHEMES, UNIFORM_SCHEMES, IntegerScheme

GOLDEN = open_safetensors(Path(__file__).parent / "golden" / "uniform.safetensors")
WEIGHT = GOLDEN["weight"].stored


def read(name: str, rows: np.ndarray) -> np.ndarray:
    out = np.empty(rows.shape, np.float32)
    SAVED_SCHEMES[name].quantize(rows).dequantize(out)
    return out


@pytest.mark.parametrize("name", ["int8", "int8_g128", "w8a8", "int4", "int4_g64", "fp8", "fp8_tensor"])
def test_codes_and_scales_of_the_package(name: str) -> None:
    scheme = UNIFORM_SCHEMES.get(name) or SAVED_SCHEMES[name]
    found = scheme.quantize(WEIGHT)
    golden = "int8" if name == "w8a8" else name
    codes, scales = GOLDEN[f"{golden}.code"].stored, GOLDEN[f"{golden}.scale"].stored
    assert found.format == scheme.format(WEIGHT.shape[1])
    assert found.scales.dtype == scales.dtype and np.array_equal(found.scales, scales)
    kept = found.codes.astype(np.int16) - 8 if found.format.zero else found.codes
    assert np.array_equal(kept.astype(np.float32), codes.astype(np.float32))
    expected = codes.astype(np.float32) * scales.astype(np.float32).repeat(WEIGHT.shape[1] // scales.shape[1], axis=1)
    assert np.array_equal(read(name, WEIGHT), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_the_package(bits: int) -> None:
    scheme = IntegerScheme("asymmetric", bits, 64, symmetric=False, scale="f32")
    found = scheme.quantize(WEIGHT)
    codes, scales, zeros = (GOLDEN[f"int{bits}_asym.{part}"].stored for part in ("code", "scale", "zero"))
    assert np.array_equal(found.scales, scales) and found.zeros is not None
    offset = 8 if bits == 4 else 0
    # Row 0 is all zeros, for which the package's zero points are 0 / 0.
    assert np.array_equal(found.zeros[1:].astype(np.int16) - offset, zeros[1:])
    assert np.array_equal(found.codes[1:].astype(np.int16) - offset, codes[1:])
    out = np.empty(WEIGHT.shape, np.float32)
    found.dequantize(out)
    expected = (codes.reshape(24, -1, 64) - zeros[:, :, None].astype(np.float32)) * scales[:, :, None]
    assert np.array_equal(out[1:], expected.reshape(24, -1)[1:]) and not out[0].any()


def test_what_activations_become() -> None:
    assert {name: scheme.activations for name, scheme in UNIFORM_SCHEMES.items() if scheme.activations != "auto"} == {
        "w8a8": "int8"
    }


@pytest.mark.parametrize(
    ("name", "size_in", "group", "bits_per_weight"),
    [
        ("int8", 256, 256, 8.125),
        ("int8", 40, 48, (2 * 8 + 1) * 32 / 40),
        ("int4", 256, 128, 4.125),
        ("int4", 40, 48, (2 * 4 + 1) * 32 / 40),
        ("int4_g64", 96, 64, 4 + 1 / 3),
    ],
)
def test_formats(name: str, size_in: int, group: int, bits_per_weight: float) -> None:
    form = UNIFORM_SCHEMES[name].format(size_in)
    assert form.size_in == size_in and form.group_size == group
    assert form.bits_per_weight == pytest.approx(bits_per_weight)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", UNIFORM_SCHEMES)
def test_narrow_weights_are_those_numbers_in_f32(name: str, dtype: type) -> None:
    narrow: np.ndarray = WEIGHT.astype(dtype)
    assert np.array_equal(read(name, narrow), read(name, narrow.astype(np.float32)))


@given(
    name=st.sampled_from(sorted(UNIFORM_SCHEMES)),
    rows=arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.integers(1, 150)),
        elements=st.floats(-1000, 1000, width=32).map(lambda x: x if abs(x) > 1e-2 else 0.0),
    ),
)
@settings(max_examples=60)
def test_errors_are_at_most_a_step(name: str, rows: np.ndarray) -> None:
    quantized = UNIFORM_SCHEMES[name].quantize(rows)
    size = quantized.format.group_size
    scale = quantized.scales.astype(np.float32).repeat(size, axis=1)[:, : rows.shape[1]]
    error = np.abs(read(name, rows) - rows)
    # Float8 has a step of 1/8 of a power of two; integers cut half a step off the peak, more if its scale is rounded.
    limit = np.maximum(np.abs(rows) / 16, scale * 2**-10) if name == "fp8" else scale * (0.5 + 2**-4)
    assert (error <= limit * (1 + 1e-5)).all()
    assert (read(name, rows)[rows == 0] == 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", UNIFORM_SCHEMES)
def test_weights_that_are_no_numbers(name: str, value: float) -> None:
    rows = np.ones((3, 64), np.float32)
    rows[1, 5] = value
    with pytest.raises(CheckpointError, match=f"infinite or not a number cannot be quantized to {name}"):
        UNIFORM_SCHEMES[name].quantize(rows)


def test_weights_beyond_float16_scales() -> None:
    with pytest.raises(
        CheckpointError, match=r"weights are too large for int4: a scale would be 1.33e\+05, beyond float16"
    ):
        UNIFORM_SCHEMES["int4"].quantize(np.full((1, 64), 1e6, np.float32))
    assert read("int8", np.full((1, 64), 3e38, np.float32)) == pytest.approx(np.full((1, 64), 3e38 / 127.5 * 127))


def test_other_groups() -> None:
    assert IntegerScheme("mine", 4, 32).quantize(WEIGHT).scales.shape == (len(WEIGHT), WEIGHT.shape[1] // 32)


def test_float8_is_rounded_to_nearest_even() -> None:
    rng = np.random.default_rng(0)
    levels = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middles = (levels[1:] + levels[:-1]) / 2
    near = np.concatenate(
        [levels, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(500))]
    )
    numbers = np.concatenate([near, -near, rng.uniform(-448, 448, 5000), rng.normal(0, 0.01, 5000), [448.0]])
    rows = numbers.astype(np.float32)[None]  # the peak is 448, so the scale is 1
    found = UNIFORM_SCHEMES["fp8"].quantize(rows)
    assert found.scales.item() == 1
    assert np.array_equal(found.codes.view(np.uint8), rows.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
