"""Products with quantized matrices for CUDA, run as XLA operations, against the dequantized weights."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.kernels.cuda.plan import ProductPlan
from llmjax.kernels.cuda.quantized_linear import (
    MAX_FLOAT8_ROWS,
    MAX_FRAGMENT_ROWS,
    MAX_ROWS,
    float8_refuses,
    linear_by_float8,
    multiplies_float8,
    multiplies_integers,
    plan_of,
    quantized_linear,
    refuses,
)
from llmjax.kernels.cuda.records import E2M1
from llmjax.kernels.qtensor import CUDA_TILE, QTensor
from llmjax.kernels.quantized_linear import QUANTIZED_LINEAR, linear_by_copy, linear_by_dequantizing
from llmjax.kernels.row_format import FLOAT8, Codes, RowFormat

NF4 = (-1.0, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0.0, 0.08, 0.161, 0.246, 0.338, 0.441, 0.563, 0.723, 1.0)

FORMATS = {
    "q4_1": RowFormat(100, Codes(4), 32, "f16", minimum="f16"),
    "q8_0": RowFormat(576, Codes(8, "int"), 32, "f16"),
    "q4_k": RowFormat(512, Codes(4), 32, "u8", minimum="u8", super_size=256),
    "q6_k": RowFormat(512, Codes(6), 16, "i8", zero=32, super_size=256),
    "gptq": RowFormat(384, Codes(4), 128, "f16", zero="u8"),
    "channel": RowFormat(200, Codes(8, "int"), 208, "bf16", zero="i8"),
    "fp8": RowFormat(256, Codes(8, "e4m3"), 128, "f32"),
    "mxfp4": RowFormat(96, Codes(4, levels=E2M1), 32, "e8m0"),
    "15 levels": RowFormat(96, Codes(4, levels=NF4[1:]), 32, "e8m0"),
    "nvfp4": RowFormat(96, Codes(4, levels=NF4), 16, "e4m3", super_size=96, super_scale="f32"),
    "bits3": RowFormat(90, Codes(3), 16, "f32"),
    "bits5": RowFormat(90, Codes(5), 48, "f32", minimum="f32", zero="i16"),
    "bits1": RowFormat(90, Codes(1), 96, "f32"),
}


def random_tensor(form: RowFormat, *, size_out: int, dtype: str = "float32", permuted: bool = False) -> QTensor:
    """Random codes; scales that neither vanish nor overflow."""
    rng = np.random.default_rng(size_out)
    tiles = -(-size_out // CUDA_TILE)
    words = rng.integers(0, 1 << 32, (tiles, form.num_words, CUDA_TILE), np.uint64).astype(np.uint32)
    if form.codes.kind in ("e4m3", "e5m2"):
        words &= np.uint32(0xBFBFBFBF)  # neither infinite nor NaN
    if form.codes.levels:
        codes = rng.integers(0, len(form.codes.levels), (*words.shape, 32 // form.codes.bits), np.uint32)
        words = (codes << np.arange(0, 32, form.codes.bits, dtype=np.uint32)).sum(-1).astype(np.uint32)
    for entry in form.fields.values():
        shape = (tiles, entry.num_words * 4, CUDA_TILE)
        match entry.number:
            case "f32":
                raw = rng.uniform(0.5, 2, (tiles, entry.num_words, CUDA_TILE)).astype(np.float32).view(np.uint32)
            case "f16" | "bf16":
                dtype16 = jnp.dtype({"f16": "float16", "bf16": "bfloat16"}[entry.number])
                raw = (
                    rng.uniform(0.5, 2, (tiles, entry.num_words, CUDA_TILE, 2)).astype(dtype16).view(np.uint32)[..., 0]
                )
            case _:
                low, high = {"e8m0": (120, 130), "e4m3": (40, 80)}.get(entry.number, (0, 256))
                raw = rng.integers(low, high, (*shape[:1], entry.num_words, CUDA_TILE, 4)).astype(np.uint8)
                raw = raw.view(np.uint32)[..., 0]
        words[:, entry.start : entry.start + entry.num_words] = raw
    columns = jnp.asarray(rng.permutation(form.size_in), jnp.int32) if permuted else None
    return QTensor(jnp.asarray(words), columns, form, size_out, jnp.dtype(dtype))


def relative_error(out: np.ndarray, x: np.ndarray, weight: QTensor) -> float:
    """Error relative to |x| |w|."""
    dense = np.asarray(weight.dequantize(), np.float64)
    sizes = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(dense, axis=1)
    return float((np.abs(out - x.astype(np.float64) @ dense.T) / sizes).max())


def inputs(rows: int, size_in: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, size_in)).astype(np.float32)


def product(
    x: np.ndarray,
    weight: QTensor,
    bias: np.ndarray | None = None,
    plan: ProductPlan | None = None,
    *,
    interpret: bool = True,
) -> np.ndarray:
    """The kernel, as XLA operations compiled in a hurry or on a card."""

    def call(x: jax.Array, weight: QTensor, bias: jax.Array | None) -> jax.Array:
        return quantized_linear(x, weight, bias, plan=plan, interpret=interpret)

    arguments = (jnp.asarray(x), weight, None if bias is None else jnp.asarray(bias))
    options = {"xla_backend_optimization_level": "0"} if interpret else None
    return np.asarray(jax.jit(call).lower(*arguments).compile(options)(*arguments))


# Every way to store codes and scales, by the kernel for few rows; the one for more reads them with the same functions.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name,rows", [("q4_k", 1), ("channel", 1), ("nvfp4", 1), ("mxfp4", 1), ("bits5", 1), ("q6_k", 5)]
)
def test_every_format_is_exact_in_float32(name: str, rows: int) -> None:
    form = FORMATS[name]
    weight = random_tensor(form, size_out=40)
    x = inputs(rows, form.size_in)
    out = product(x, weight)
    assert out.shape == (rows, 40)
    assert out.dtype == np.float32
    assert relative_error(out, x, weight) < 3e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows,plan",
    [
        (2, ProductPlan(rows=2, outputs=32, chunks=4, steps=2, splits=2, warps=1)),
        (20, ProductPlan(rows=16, outputs=32, chunks=16, steps=1, splits=1, warps=4)),
        (70, None),
    ],
)
def test_rows_divisions_bias_and_columns(rows: int, plan: ProductPlan | None) -> None:
    form = FORMATS["gptq"]
    weight = random_tensor(form, size_out=75, permuted=True)
    x, bias = inputs(rows, form.size_in), np.arange(75, dtype=np.float32)
    out = product(x, weight, bias, plan)
    assert relative_error(out - bias, x, weight) < 3e-6


@pytest.mark.slow
def test_16_bit_weights_round_once_where_tiles_are_dequantized() -> None:
    form = FORMATS["nvfp4"]
    weight = random_tensor(form, size_out=33, dtype="bfloat16")
    x = np.asarray(jnp.asarray(inputs(9, form.size_in), jnp.bfloat16))
    out = product(x, weight)
    rounded = np.asarray(weight.dequantize().astype(jnp.bfloat16), np.float64)
    expected = x.astype(np.float64) @ rounded.T
    assert np.abs(out - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.slow
def test_integers_meet_integers_where_they_may() -> None:
    """Exactly the products of x rounded row by row."""
    form = RowFormat(590, Codes(8, "int"), 592, "f32")
    weight = dataclasses.replace(random_tensor(form, size_out=40), activations="int8")
    assert multiplies_integers(weight)
    x = inputs(20, form.size_in)
    x[3] = 0
    scale = np.maximum(np.abs(x).max(1, keepdims=True), 1e-30) / np.float32(127)
    expected = (np.round(x / scale) * scale).astype(np.float64) @ np.asarray(weight.dequantize(), np.float64).T
    out = product(x, weight)
    assert np.abs(out - expected).max() < 1e-6 * np.abs(expected).max()
    assert relative_error(out[:3], x[:3], weight) < 8e-3


@pytest.mark.slow
def test_codes_of_eight_bits_are_read_as_they_are() -> None:
    """Every code of both float formats, NaN and infinities apart."""
    for kind in ("e4m3", "e5m2"):
        form = RowFormat(256, Codes(8, kind), 256, "f32")
        weight = random_tensor(form, size_out=1)
        words = np.asarray(weight.words).copy()
        codes = np.arange(256, dtype=np.uint8)
        codes[~np.isfinite(codes.view(FLOAT8[kind]).astype(np.float32))] = 0
        words[0, :64, 0] = codes.view(np.uint32)
        words[0, 64] = np.float32(1).view(np.uint32)
        weight = dataclasses.replace(weight, words=jnp.asarray(words))
        expected = np.asarray(weight.dequantize())[0]
        found = product(np.eye(256, dtype=np.float32), weight)
        assert len(set(expected.tolist())) >= 246
        np.testing.assert_array_equal(found[:, 0], expected)


@pytest.mark.parametrize("size_in,group,rows", [(300, 304, 20), (640, 128, 3), (768, 256, 70)])
def test_8_bit_floats_meet_8_bit_floats_where_they_may(size_in: int, group: int, rows: int) -> None:
    """Exactly the products of x rounded by ml_dtypes, token by token and group by group."""
    form = RowFormat(size_in, Codes(8, "e4m3"), group, "f32")
    weight = dataclasses.replace(random_tensor(form, size_out=75), activations="fp8")
    assert multiplies_float8(weight)
    assert not multiplies_float8(dataclasses.replace(weight, activations="float"))
    x = inputs(rows, size_in) * np.float32(100)
    x[1] = 0
    rounded = np.zeros_like(x)
    for first in range(0, size_in, group):
        part = x[:, first : first + group]
        scale = np.maximum(np.abs(part).max(1, keepdims=True), 1e-30) / np.float32(448)
        rounded[:, first : first + group] = (part / scale).astype(jnp.float8_e4m3fn).astype(np.float32) * scale
    expected = rounded.astype(np.float64) @ np.asarray(weight.dequantize(), np.float64).T
    out = product(x, weight)
    assert np.abs(out - expected).max() < 2e-6 * np.abs(expected).max()
    assert (out[1] == 0).all()
    assert relative_error(out[[0, 2]], x[[0, 2]], weight) < 0.04


@pytest.mark.parametrize(("size_in", "size_out"), [(304, 80), (640, 32)])
def test_many_rows_of_8_bit_floats_are_one_product_of_them(size_in: int, size_out: int) -> None:
    form = RowFormat(size_in, Codes(8, "e4m3"), size_in, "f32")
    weight = dataclasses.replace(random_tensor(form, size_out=size_out), activations="fp8")
    x = inputs(MAX_FLOAT8_ROWS + 1, size_in) * np.float32(100)
    x[1] = 0
    given = jnp.asarray(x), weight, None
    assert QUANTIZED_LINEAR.pick("cuda", *given).name == "XLA, 8-bit floats"
    assert QUANTIZED_LINEAR.pick("cuda", given[0][:-1], weight, None).name == "Pallas"
    scale = np.maximum(np.abs(x).max(1, keepdims=True), 1e-30) / np.float32(448)
    rounded = (x / scale).astype(jnp.float8_e4m3fn).astype(np.float64) * scale
    expected = rounded @ np.asarray(weight.dequantize(), np.float64).T
    bias = jnp.arange(size_out, dtype=jnp.float32)
    found = np.asarray(linear_by_float8(given[0], weight, bias)) - np.asarray(bias)
    assert np.abs(found - expected).max() < 2e-6 * max(np.abs(expected).max(), size_out)


def test_groups_odd_sizes_and_stacks_are_no_product_of_8_bit_floats() -> None:
    x = jnp.ones((MAX_FLOAT8_ROWS + 1, 640))
    for form, size_out, why in (
        (RowFormat(640, Codes(8, "e4m3"), 128, "f32"), 32, "scales of groups"),
        (RowFormat(600, Codes(8, "e4m3"), 608, "f32"), 32, "sizes that are not multiples of 16"),
        (RowFormat(640, Codes(8, "e4m3"), 640, "f32"), 33, "sizes that are not multiples of 16"),
        (RowFormat(640, Codes(8, "int"), 640, "f32"), 32, "not E4M3"),
    ):
        weight = dataclasses.replace(random_tensor(form, size_out=size_out), activations="fp8")
        assert why in str(float8_refuses(x, weight))


@pytest.mark.parametrize("permuted", [False, True])
def test_many_rows_are_multiplied_with_a_copy_where_there_is_one(permuted: bool) -> None:
    weight = random_tensor(FORMATS["gptq"], size_out=64, dtype="bfloat16", permuted=permuted)
    kept = dataclasses.replace(weight, copy=weight.dequantize().astype(weight.dtype))
    assert kept.nbytes == weight.nbytes + 2 * 64 * 384
    x, bias = inputs(MAX_FRAGMENT_ROWS + 1, 384), jnp.arange(64, dtype=jnp.float32)
    assert QUANTIZED_LINEAR.pick("cuda", x, kept, bias).name == "XLA, a copy in 16 bits"
    assert QUANTIZED_LINEAR.pick("cuda", x[:-1], kept, bias).name == "Pallas"
    assert QUANTIZED_LINEAR.pick("cuda", x, weight, bias).name == "XLA, dequantizing once"
    x = np.asarray(x.astype(jnp.bfloat16), np.float32)
    found, expected = (
        np.asarray(way(jnp.asarray(x), one, bias))
        for way, one in ((linear_by_copy, kept), (linear_by_dequantizing, weight))
    )
    assert permuted or (found == expected).all()  # columns in another order are added up in it
    assert relative_error(found - np.asarray(bias), x, kept) < 5e-3


def test_what_is_not_float8_times_a_scale_is_not_multiplied_as_such() -> None:
    for form in (
        RowFormat(640, Codes(8, "e4m3"), 64, "f32"),
        RowFormat(640, Codes(8, "e5m2"), 128, "f32"),
        RowFormat(640, Codes(8, "int"), 128, "f32"),
    ):
        assert not multiplies_float8(dataclasses.replace(random_tensor(form, size_out=32), activations="fp8"))


def test_products_of_int8_are_as_deep_as_the_hardware_wants() -> None:
    """However small the matrix: a product takes a column of each of 32 chunks."""
    form = RowFormat(1024, Codes(8, "int"), 1024, "f32")
    for size_out in (64, 4096):
        words = jax.ShapeDtypeStruct((size_out // CUDA_TILE, form.num_words, CUDA_TILE), jnp.uint32)
        weight = QTensor(words, None, form, size_out, jnp.dtype("bfloat16"), "int8")
        assert multiplies_integers(weight)
        plans = [plan_of(rows, weight) for rows in (3, 16, 64, 512)]
        assert all(isinstance(plan, ProductPlan) and plan.chunks >= 32 for plan in plans)


@given(rows=st.integers(1, MAX_ROWS), size_in=st.integers(1, 30_000), size_out=st.integers(1, 200_000))
def test_plans_cover_every_matrix(rows: int, size_in: int, size_out: int) -> None:
    form = RowFormat(size_in, Codes(4), 32, "f16")
    tiles = -(-size_out // CUDA_TILE)
    words = jax.ShapeDtypeStruct((tiles, form.num_words, CUDA_TILE), jnp.uint32)
    plan = plan_of(rows, QTensor(words, None, form, size_out, jnp.dtype("float32")))
    assert isinstance(plan, ProductPlan)
    read = plan.splits * plan.steps * plan.chunks
    assert form.num_chunks <= read < form.num_chunks + plan.splits * plan.chunks + plan.chunks
    assert plan.outputs % CUDA_TILE == 0
    for number in (plan.outputs, plan.chunks, plan.warps):
        assert number & (number - 1) == 0


def test_says_what_it_refuses() -> None:
    weight = random_tensor(FORMATS["q8_0"], size_out=40)
    x = jnp.zeros((1, 576))
    assert refuses(x, weight) is None
    assert refuses(jnp.zeros((MAX_ROWS, 576)), weight) is None
    assert "dequantized once" in str(refuses(jnp.zeros((MAX_ROWS + 1, 576)), weight))
    fragments = random_tensor(FORMATS["q8_0"], size_out=40, dtype="bfloat16")
    assert refuses(jnp.zeros((MAX_FRAGMENT_ROWS, 576)), fragments) is None
    assert "more than 128 rows" in str(refuses(jnp.zeros((MAX_FRAGMENT_ROWS + 1, 576)), fragments))
    by_row = random_tensor(RowFormat(576, Codes(8, "int"), 576, "f32"), size_out=40, dtype="bfloat16")
    assert refuses(jnp.zeros((MAX_ROWS, 576)), dataclasses.replace(by_row, activations="int8")) is None
    assert refuses(jnp.zeros((0, 576)), weight) == "no rows"
    stack = dataclasses.replace(weight, words=weight.words[None])
    assert refuses(x, stack) == "a stack of matrices"
    other = dataclasses.replace(weight, words=weight.words.reshape(4, -1, 16))
    assert "interleaved by 16" in str(refuses(x, other))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 33, 300])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_on_a_card(name: str, rows: int, dtype: str, cuda_device: jax.Device) -> None:
    form = dataclasses.replace(FORMATS[name], size_in=32 * FORMATS[name].size_in)
    weight = random_tensor(form, size_out=1000, dtype=dtype)
    x = inputs(rows, form.size_in)
    out = product(np.asarray(jnp.asarray(x, dtype)), weight, interpret=False)
    expected = np.asarray(jnp.asarray(x, dtype), np.float64) @ np.asarray(weight.dequantize(), np.float64).T
    limit = 1e-5 if dtype == "float32" else 1e-2
    assert np.linalg.norm(out - expected) <= limit * np.linalg.norm(expected)
