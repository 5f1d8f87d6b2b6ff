"""C++ products with quantized matrices against the dequantized weights: formats, rows, methods, instruction sets."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.cpu.library import forced_isa, library
from llmjax.kernels.cpu.linear import linears
from llmjax.kernels.cpu.matrices import METHODS, attributes
from llmjax.kernels.qtensor import INT8_DECODES, INT8_VECTORS, QTensor, rounding_decodes
from llmjax.kernels.quantized_linear import QUANTIZED_LINEAR, linear_by_dequantizing
from llmjax.kernels.row_format import Codes, RowFormat
from llmjax.weights.packing import pack
from llmjax.weights.rows import CODE_DTYPES, NUMBER_DTYPES, QuantizedRows
from tests.kernels.instruction_sets import each_isa

native = library()
pytestmark = pytest.mark.skipif(native is None, reason="the C++ kernels are not built")

NF4 = (-1.0, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0.0, 0.08, 0.161, 0.246, 0.338, 0.441, 0.563, 0.723, 1.0)

FORMATS = {
    "q4_0": RowFormat(288, Codes(4), 32, "f16", zero=8),
    "q4_1": RowFormat(100, Codes(4), 32, "f16", minimum="f16"),
    "q8_0": RowFormat(576, Codes(8, "int"), 32, "f16"),
    "q4_k": RowFormat(512, Codes(4), 32, "u8", minimum="u8", super_size=256),
    "q6_k": RowFormat(512, Codes(6), 16, "i8", zero=32, super_size=256),
    "gptq": RowFormat(384, Codes(4), 128, "f16", zero="u8"),
    "channel": RowFormat(200, Codes(8, "int"), 208, "f32"),
    "wide channel": RowFormat(1290, Codes(8, "int"), 1296, "f32"),
    "fp8": RowFormat(256, Codes(8, "e4m3"), 128, "f32"),
    "int4": RowFormat(216, Codes(4), 128, "f32", zero=8),
    "nf4": RowFormat(256, Codes(4, levels=NF4), 64, "f32"),
    "bits3": RowFormat(90, Codes(3), 16, "f32"),
    "bits5": RowFormat(90, Codes(5), 48, "f32", minimum="f32"),
    "bits6": RowFormat(340, Codes(6), 64, "f32", minimum="f32"),
    "ternary": RowFormat(90, Codes(2, levels=(-1, 0, 1)), 96, "f32"),
    "bits1": RowFormat(90, Codes(1), 96, "f32"),
}

# Of |x| |w|. Integers have 7 or 15 bits and a sign for the peak of a block, bfloat16 8 bits for every number.
LIMITS = {
    "float vectors": 1e-6,
    "float panels": 1e-6,
    "int8 vectors": 8e-3,
    "bf16 panels": 4e-3,
    "bf16 tiles": 4e-3,
    "int16 panels": 4e-5,
    "int8 tiles": 1e-2,
}


@dataclasses.dataclass(frozen=True)
class Stored:
    rows: QuantizedRows
    columns: None = None
    row_step: int = 1

    @property
    def format(self) -> RowFormat:
        return self.rows.format

    @property
    def size_out(self) -> int:
        return len(self.rows.codes)

    def quantized_rows(self, start: int, stop: int) -> QuantizedRows:
        names = ("codes", "scales", "zeros", "minima", "super_scales", "super_minima")
        parts = {name: getattr(self.rows, name) for name in names}
        return QuantizedRows(self.format, **{n: None if a is None else a[start:stop] for n, a in parts.items()})


@cache
def tensor(form: RowFormat, *, size_out: int = 40, activations: str = "int8") -> QTensor:
    rng = np.random.default_rng(0)
    top = len(form.codes.levels) or 1 << form.codes.bits
    codes = rng.integers(0, top, (size_out, form.size_in)).astype(np.uint8).view(CODE_DTYPES[form.codes.kind])
    if form.codes.kind == "e4m3":
        codes = rng.standard_normal((size_out, form.size_in)).astype(codes.dtype)

    def numbers(number: str, count: int) -> np.ndarray:
        dtype = NUMBER_DTYPES[number]
        if dtype.kind in "iu":
            return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, (size_out, count)).astype(dtype)
        return rng.standard_normal((size_out, count)).astype(dtype)

    parts = {name: numbers(entry.number, entry.count) for name, entry in form.fields.items()}
    words = pack(Stored(QuantizedRows(form, codes, **parts)), tile=16)
    return QTensor(jnp.asarray(words), None, form, size_out, jnp.dtype(jnp.bfloat16), activations)


@cache
def exact(form: RowFormat, size_out: int) -> np.ndarray:
    """The weights of ``tensor``, f64 [out, in]."""
    return np.asarray(jax.jit(QTensor.dequantize)(tensor(form, size_out=size_out)), np.float64)


def relative_error(out: np.ndarray, x: np.ndarray, weight: QTensor) -> float:
    dense = exact(weight.format, weight.size_out)
    sizes = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(dense, axis=1)
    return float((np.abs(np.asarray(out) - x.astype(np.float64) @ dense.T) / sizes).max())


REFUSED = (jax.errors.JaxRuntimeError, ValueError)  # which, is a matter of whether JAX runs a program at once

# Instruction sets that have a method, or a narrower one of whose it is; the others are in all of them.
OWNERS = {
    "int16 panels": ("avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx"),
    "bf16 panels": ("avx512bf16", "amx"),
    "bf16 tiles": ("amx",),
    "int8 tiles": ("amx",),
}


def has(isa: str, method: str, form: RowFormat) -> bool:
    """Whether a method is there, and takes the codes of a format."""
    levels = np.array(form.codes.levels or [0.0])
    integers = form.codes.kind in ("uint", "int") and any(
        (levels * factor == np.round(levels * factor)).all() for factor in (1, 2, 4, 8, 16, 32, 64)
    )
    takes = {
        "int8 vectors": integers,
        "int16 panels": integers,
        "bf16 panels": not integers,
        "int8 tiles": integers and (form.group_size >= form.size_in or form.group_size % 256 == 0),
    }
    return isa in OWNERS.get(method, (isa,)) and takes.get(method, True)


@partial(jax.jit, static_argnames="method")
def _products(
    xs: list[jax.Array], weight: QTensor, biases: list[jax.Array | None], *, method: str | None
) -> list[jax.Array]:
    return [linears(x, [weight], [bias], method=method)[0] for x, bias in zip(xs, biases, strict=True)]


def products(
    xs: list[np.ndarray], weight: QTensor, biases: list[np.ndarray | None], *, isa: str, method: str
) -> list[np.ndarray]:
    """One for each x and bias, from one program, which is the same for all instruction sets. None at all, and that is
    made sure of, where this one lacks the method, or the method does not take these codes."""
    if has(isa, method, weight.format):
        return [np.asarray(out) for out in _products(xs, weight, biases, method=method)]
    with pytest.raises(REFUSED, match="the method does not take these codes or this instruction"):
        jax.block_until_ready(_products(xs, weight, biases, method=method))
    return []


@each_isa
@pytest.mark.parametrize("name", FORMATS)
def test_every_method_is_within_the_error_of_its_rounding(name: str, isa: str) -> None:
    weight = tensor(FORMATS[name])
    shapes = [(rows, FORMATS[name].size_in) for rows in (1, 3, 7, 20, 50)]
    xs = [np.random.default_rng(rows).standard_normal((rows, size)).astype(np.float32) for rows, size in shapes]
    tried = set()
    for method in METHODS:
        for x, out in zip(xs, products(xs, weight, [None] * len(xs), isa=isa, method=method), strict=False):
            tried.add(method)
            assert relative_error(out, x, weight) < LIMITS[method], (method, len(x))
    assert tried == {method for method in METHODS if has(isa, method, FORMATS[name])}
    assert {"float vectors", "float panels"} <= tried


@each_isa
@pytest.mark.parametrize("size_out", [16, 40, 96])
@pytest.mark.parametrize("group", [32, 256])
@pytest.mark.parametrize("method", METHODS)
def test_rows_and_columns_in_parts(method: str, group: int, size_out: int, isa: str) -> None:
    codes = Codes(4, levels=NF4) if method == "bf16 panels" else Codes(4)
    weight = tensor(RowFormat(1290, codes, group, "f16", minimum="f16"), size_out=size_out)
    rng = np.random.default_rng(0)
    x, bias = rng.standard_normal((450, 1290)).astype(np.float32), rng.standard_normal(size_out).astype(np.float32)
    found = products([x, x], weight, [None, bias], isa=isa, method=method)
    assert len(found) == 2 * has(isa, method, weight.format)
    for out, added in zip(found, (0, bias), strict=False):
        assert relative_error(out - added, x, weight) < LIMITS[method]


@each_isa
@pytest.mark.parametrize(
    "codes", [Codes(1), Codes(2), Codes(3), Codes(4), Codes(5), Codes(6), Codes(8, "int")], ids=str
)
def test_integer_sums_hold_the_largest_codes_and_inputs(codes: Codes, isa: str) -> None:
    """All inputs are the peaks of their blocks, so that they round to the largest integers without an error."""
    size = 224
    smallest = -128 if codes.kind == "int" else 0
    largest = (1 << codes.bits) - 1 + smallest
    rows = [
        np.full(size, largest),
        np.full(size, smallest),
        np.tile([largest, smallest], size // 2),
        np.tile([smallest] * 2 + [largest] * 2, size // 4),
    ]
    values = np.stack([row.astype(CODE_DTYPES[codes.kind]) for row in rows * 4])
    offsets: list[dict[str, Any]] = [{"minimum": "f32"}, {"zero": 1 << (codes.bits - 1)}]
    for group, offset in itertools.product((16, 32, 192, 224), [{}] if codes.kind == "int" else offsets):
        form = RowFormat(size, codes, group, "f32", **offset)
        parts = {name: np.ones((16, entry.count), np.float32) for name, entry in form.fields.items()}
        words = pack(Stored(QuantizedRows(form, values, **parts)), tile=16)
        weight = QTensor(jnp.asarray(words), None, form, 16, jnp.dtype(jnp.float32), "int8")
        dense = np.asarray(weight.dequantize(), np.float64)
        ones = np.ones(size)
        signs = np.stack([ones, -ones, np.tile([1, -1], size // 2), np.tile([-1, -1, 1, 1], size // 4)] * 5)
        x = signs[:17].astype(np.float32)
        xs = [x, x[:1], x[1:4]]
        for method in ("int8 vectors", "int8 tiles", "int16 panels"):
            found = products(xs, weight, [None] * 3, isa=isa, method=method)
            assert len(found) == 3 * has(isa, method, form)
            for out, given in zip(found, xs, strict=False):
                np.testing.assert_allclose(out, given @ dense.T, rtol=1e-5, atol=1e-2)


def both(x: jax.Array, weight: QTensor, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The platform's product and the portable one."""
    return QUANTIZED_LINEAR(x, weight, bias), linear_by_dequantizing(x, weight, bias)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [0, 1, 5, 33])
def test_the_operation_keeps_float_activations_exact(name: str, rows: int) -> None:
    weight = dataclasses.replace(tensor(FORMATS[name], activations="float"), dtype=jnp.dtype(jnp.float32))
    x = np.random.default_rng(1).standard_normal((rows, FORMATS[name].size_in)).astype(np.float32)
    bias = np.arange(40, dtype=np.float32)
    out, portable = jax.jit(both)(x, weight, bias)
    assert out.shape == (rows, 40)
    if rows:
        assert relative_error(np.asarray(out) - bias, x, weight) < 1e-5
        assert relative_error(np.asarray(portable) - bias, x, weight) < 1e-5


@each_isa
@pytest.mark.parametrize("name", ["q4_1", "q8_0", "q6_k", "nf4", "fp8"])
def test_activations_are_rounded_in_decode_steps_alone(name: str, isa: str) -> None:
    form = FORMATS[name]
    weight = dataclasses.replace(tensor(form, activations=INT8_DECODES), dtype=jnp.dtype(jnp.float32))
    rounding = rounding_decodes({"layer": [weight]})["layer"][0]
    xs = [np.random.default_rng(n).standard_normal((n, form.size_in)).astype(np.float32) for n in (1, 5, 17, 70)]

    outs = [out for w in (weight, rounding) for out in _products(xs, w, [None] * 4, method=None)]
    for x, exact, rounded in zip(xs, outs, outs[len(xs) :], strict=False):
        assert relative_error(np.asarray(exact), x, weight) < 1e-6, len(x)
        integers = name not in ("nf4", "fp8")  # what other codes stand for is not a small integer
        if integers and (len(x) == 1 or isa != "amx"):
            assert 1e-5 < relative_error(np.asarray(rounded), x, weight) < 8e-3, len(x)


@each_isa
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize(
    "method", ["float panels", "int8 vectors", "int16 panels", "bf16 panels", "bf16 tiles", "int8 tiles"]
)
def test_a_row_does_not_depend_on_the_rows_that_pass_with_it(method: str, biased: bool, isa: str) -> None:
    group = 256 if method == "int8 tiles" else 32
    codes = Codes(4, levels=NF4) if method == "bf16 panels" else Codes(4)
    weight = tensor(RowFormat(1290, codes, group, "f16", minimum="f16"), size_out=90, activations="float")
    x = np.random.default_rng(0).standard_normal((70, 1290)).astype(np.float32) ** 3  # some rows have outliers, of int8
    parts = [np.asarray(part) for part in (x, x[:1], x[3:10], x[11:])]
    bias = np.random.default_rng(1).standard_normal(90).astype(np.float32) if biased else None
    outs = products(parts, weight, [bias] * 4, isa=isa, method=method)
    assert len(outs) == 4 * has(isa, method, weight.format)
    for out, (begin, end) in zip(outs[1:], ((0, 1), (3, 10), (11, 70)), strict=False):
        np.testing.assert_array_equal(out, outs[0][begin:end])


@each_isa
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("nf4", "fp8", "bits1")])
def test_rows_rounded_to_int8_are_the_same_alone_and_keep_their_outliers(name: str, isa: str) -> None:
    form = FORMATS[name]
    weight = tensor(form)
    if not has(isa, "int8 vectors", form):
        return
    x = np.random.default_rng(6).standard_normal((37, form.size_in)).astype(np.float32)
    rows = np.arange(1, 37, 2)
    x[rows, rows * 7 % form.size_in] = 1000  # 1000 times what is rounded beside them
    x[4] = 0
    x[4, 3] = -5  # nothing but an outlier
    parts = [x, *(x[i : i + n] for n in (1, 2, 3, 4, 5, 7, 8, 16) for i in (0, 3))]
    outs = products(parts, weight, [None] * len(parts), isa=isa, method="int8 vectors")
    for part, out in zip(parts[1:], outs[1:], strict=True):
        at = next(i for i in (0, 3) if np.array_equal(part, x[i : i + len(part)]))
        np.testing.assert_array_equal(out, outs[0][at : at + len(part)])
    dense = exact(form, weight.size_out)
    errors = np.abs(outs[0] - x.astype(np.float64) @ dense.T)
    others = np.where(np.abs(x) > 100, 0, x)
    sums = 1e-6 * np.linalg.norm(x, axis=1)[:, None]  # of f32
    rounded = 8e-3 * np.linalg.norm(others, axis=1)[:, None]
    assert (errors <= (sums + rounded) * np.linalg.norm(dense, axis=1)).all()


@each_isa
def test_rows_of_outliers_alone_do_not_run_over(isa: str) -> None:
    """The most outliers that a row can have, and rows with NaN or infinity."""
    form = FORMATS["q4_1"]
    weight = tensor(form)
    x = np.full((9, form.size_in), 1e-3, np.float32)
    x[:, ::17] = 3.0
    x[7, 5], x[8, 6] = np.nan, np.inf
    (out,) = products([x], weight, [None], isa=isa, method="int8 vectors")
    assert relative_error(out[:7], x[:7], weight) < LIMITS["int8 vectors"]
    assert np.isnan(out[7:]).all()


@pytest.mark.parametrize(("activations", "expected"), [("float", (0, 0)), ("int8", (1, 1)), (INT8_VECTORS, (1, 0))])
def test_what_x_may_be_rounded_to(activations: str, expected: tuple[int, int]) -> None:
    weight = dataclasses.replace(tensor(FORMATS["q4_1"], activations=activations), dtype=jnp.dtype(jnp.float32))
    assert tuple(attributes([weight])["matrices"][1:3]) == expected


@pytest.mark.skipif(native is None or "amx" not in native.usable, reason="no tile registers")
@pytest.mark.parametrize(
    ("name", "rows", "activations", "method"),
    [
        ("wide channel", 8, "int8", "int8 vectors"),
        ("wide channel", 64, "int8", "bf16 tiles"),
        ("wide channel", 65, "int8", "int8 tiles"),
        ("wide channel", 65, "float", "bf16 tiles"),
        ("gptq", 65, "int8", "bf16 tiles"),  # its groups are too small
        ("fp8", 65, "int8", "bf16 tiles"),
    ],
)
def test_wide_groups_are_multiplied_as_bytes_in_tiles(name: str, rows: int, activations: str, method: str) -> None:
    weight = tensor(FORMATS[name], activations=activations)
    x = np.random.default_rng(3).standard_normal((rows, FORMATS[name].size_in)).astype(np.float32)
    with forced_isa("amx"):
        (chosen,) = linears(jnp.asarray(x), [weight], [None])
        (forced,) = linears(jnp.asarray(x), [weight], [None], method=method)
        np.testing.assert_array_equal(chosen, forced)


@each_isa
@pytest.mark.parametrize("method", ["int8 vectors", "int8 tiles"])
def test_matrices_whose_groups_differ_share_the_scales_of_x(method: str, isa: str) -> None:
    forms = [RowFormat(520, Codes(4), 256, "f16", zero="u8"), RowFormat(520, Codes(8, "int"), 528, "f32")]
    weights = [tensor(form, size_out=40) for form in forms]
    x = np.random.default_rng(4).standard_normal((20, 520)).astype(np.float32)
    if not all(has(isa, method, form) for form in forms):
        with pytest.raises(REFUSED, match="the method does not take"):
            jax.block_until_ready(linears(jnp.asarray(x), weights, [None] * 2, method=method))
        return
    outs = linears(jnp.asarray(x), weights, [None] * 2, method=method)
    assert all(relative_error(np.asarray(out), x, w) < LIMITS[method] for out, w in zip(outs, weights, strict=True))


def test_weights_of_one_input_share_a_call() -> None:
    weights = [tensor(FORMATS["q4_k"], size_out=size) for size in (16, 40)] + [tensor(FORMATS["q6_k"], size_out=24)]
    x = np.random.default_rng(2).standard_normal((3, 512)).astype(np.float32)
    outs = linears(jnp.asarray(x), weights, [None] * 3)
    assert [out.shape for out in outs] == [(3, 16), (3, 40), (3, 24)]
    assert all(relative_error(np.asarray(out), x, weight) < 8e-3 for out, weight in zip(outs, weights, strict=True))
