"""Records of quantized rows against the formula on plain arrays, over codes, groups, scales and tiles."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmjax.kernels.qtensor import QTensor
from llmjax.kernels.row_format import NUMBER_BITS, Codes, RowFormat
from llmjax.weights.packing import pack
from llmjax.weights.rows import CODE_DTYPES, NUMBER_DTYPES, QuantizedRows

NF4 = (-1.0, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0.0, 0.08, 0.161, 0.246, 0.338, 0.441, 0.563, 0.723, 1.0)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A matrix whose rows are all at hand."""

    rows: QuantizedRows
    columns: np.ndarray | None = None

    row_step: int = 1

    @property
    def format(self) -> RowFormat:
        return self.rows.format

    @property
    def size_out(self) -> int:
        return len(self.rows.codes)

    def quantized_rows(self, start: int, stop: int) -> QuantizedRows:
        arrays = {
            name: None if (array := getattr(self.rows, name)) is None else array[start:stop]
            for name in ("codes", "scales", "zeros", "minima", "super_scales", "super_minima")
        }
        return QuantizedRows(self.format, **arrays)


def numbers(rng: np.random.Generator, number: str, shape: tuple[int, int]) -> np.ndarray:
    dtype = NUMBER_DTYPES[number]
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max + 1, shape).astype(dtype)
    if number == "e8m0":
        return rng.integers(100, 140, shape, dtype=np.uint8).view(dtype)
    return rng.standard_normal(shape).astype(dtype)


def random_rows(form: RowFormat, size_out: int, seed: int) -> QuantizedRows:
    rng = np.random.default_rng(seed)
    top = len(form.codes.levels) or 1 << form.codes.bits
    codes = rng.integers(0, top, (size_out, form.size_in)).astype(np.uint8).view(CODE_DTYPES[form.codes.kind])
    if form.codes.kind in ("e4m3", "e5m2"):
        codes = rng.standard_normal((size_out, form.size_in)).astype(codes.dtype)
    arrays = {name: numbers(rng, entry.number, (size_out, entry.count)) for name, entry in form.fields.items()}
    return QuantizedRows(form, codes, **arrays)


def q_tensor(rows: QuantizedRows, *, tile: int, columns: np.ndarray | None = None) -> QTensor:
    words = pack(Stored(rows), tile=tile)
    return QTensor(
        words=jnp.asarray(words),
        columns=None if columns is None else jnp.asarray(columns),
        format=rows.format,
        size_out=len(rows.codes),
        dtype=jnp.dtype(jnp.float32),
    )


def weights_of(rows: QuantizedRows) -> np.ndarray:
    out = np.empty(rows.codes.shape, np.float32)
    rows.dequantize(out)
    return out


codes = st.one_of(
    st.sampled_from([1, 2, 3, 4, 5, 6]).map(Codes),
    st.sampled_from(["int", "e4m3", "e5m2"]).map(lambda kind: Codes(8, kind)),
    st.sampled_from([Codes(4, levels=NF4), Codes(3, levels=(-9, -7, -1, 1, 7, 9)), Codes(2, levels=(-1, 0, 1))]),
)
number_types = st.sampled_from(sorted(NUMBER_BITS))


@st.composite
def formats(draw: st.DrawFn) -> RowFormat:
    group = 16 * draw(st.integers(1, 9))
    return RowFormat(
        size_in=draw(st.integers(1, 300)),
        codes=draw(codes),
        group_size=group,
        scale=draw(number_types),
        zero=draw(st.one_of(st.integers(0, 32), st.sampled_from(["u8", "i8", "i16"]))),
        minimum=draw(st.one_of(st.just(""), number_types)),
        super_size=group * draw(st.integers(0, 4)),
        super_scale=draw(st.sampled_from(["f16", "f32", "bf16"])),
    )


matrices = given(form=formats(), size_out=st.integers(1, 40), tile=st.sampled_from([1, 8, 16]), seed=st.integers(0, 9))


DIFFERENCES = RowFormat(  # much smaller than their terms
    size_in=4,
    codes=Codes(4, levels=NF4),
    group_size=16,
    scale="bf16",
    zero="i8",
    minimum="bf16",
    super_size=16,
    super_scale="f16",
)


@example(form=DIFFERENCES, size_out=1, tile=1, seed=4)
@matrices
@settings(max_examples=12)
def test_dequantize_is_what_the_rows_say(form: RowFormat, size_out: int, tile: int, seed: int) -> None:
    check_dequantize(form, size_out, tile, seed)


@pytest.mark.slow
@matrices
@settings(max_examples=100)
def test_dequantize_is_what_the_rows_say_in_many_formats(form: RowFormat, size_out: int, tile: int, seed: int) -> None:
    check_dequantize(form, size_out, tile, seed)


def check_dequantize(form: RowFormat, size_out: int, tile: int, seed: int) -> None:
    rows = random_rows(form, size_out, seed)
    tensor, expected = q_tensor(rows, tile=tile), weights_of(rows)
    assert tensor.shape == expected.shape
    taken = np.array([0, size_out - 1, size_out // 2], np.int32)
    found, found_rows = jax.jit(lambda tensor, rows: (tensor.dequantize(), tensor.take(rows)))(tensor, taken)
    # An inexact product may be fused with the subtraction that follows, which may leave little of both.
    products = weights_of(dataclasses.replace(rows, minima=None))
    scale = max(np.abs(expected).max(), np.abs(products).max()) + 1e-30
    np.testing.assert_allclose(np.asarray(found) / scale, expected / scale, atol=3e-7)
    np.testing.assert_allclose(np.asarray(found_rows) / scale, expected[taken] / scale, atol=3e-7)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
def test_words_hold_columns_as_documented(bits: int) -> None:
    form = RowFormat(size_in=64, codes=Codes(bits), group_size=32, scale="f32")
    rows = random_rows(form, 1, 0)
    words = pack(Stored(rows), tile=1)[0, :, 0]
    found, low = np.zeros((1, 64), np.uint8), 0
    for width in {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}[bits]:
        for chunk in range(2):
            for q in range(width):
                for s in range(8 // width):
                    for b in range(4):
                        piece = int(words[chunk * bits + low + q]) >> (8 * b + width * s) & ((1 << width) - 1)
                        found[0, 32 * chunk + 4 * (s * width + q) + b] |= piece << low
        low += width
    np.testing.assert_array_equal(found, rows.codes)


def test_columns_say_where_stored_ones_belong() -> None:
    form = RowFormat(size_in=96, codes=Codes(4), group_size=32, scale="f16", zero="u8")
    rows = random_rows(form, 20, 1)
    columns = np.random.default_rng(2).permutation(96).astype(np.int32)
    tensor = q_tensor(rows, tile=16, columns=columns)
    np.testing.assert_array_equal(np.asarray(tensor.dequantize())[:, columns], weights_of(rows))


def test_stacks_keep_their_leading_axes() -> None:
    form = RowFormat(size_in=64, codes=Codes(4), group_size=32, scale="f16", minimum="f16")
    experts = [random_rows(form, 20, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(q_tensor(rows, tile=16) for rows in experts))
    assert stacked.shape == (3, 20, 64)
    np.testing.assert_array_equal(stacked.dequantize(), np.stack([weights_of(rows) for rows in experts]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 24}, "groups of 24"),
        ({"scale": "f64"}, "'f64' is unknown"),
        ({"super_size": 48}, "do not divide"),
        ({"size_in": 0}, "rows of 0"),
    ],
)
def test_impossible_formats_are_refused(changes: dict, message: str) -> None:
    form = RowFormat(size_in=64, codes=Codes(4), group_size=32, scale="f16")
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(form, **changes)


@pytest.mark.parametrize(
    ("bits", "kind", "levels"), [(7, "uint", ()), (8, "uint", ()), (4, "int", ()), (5, "uint", (1.0,))]
)
def test_impossible_codes_are_refused(bits: int, kind: str, levels: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="codes of"):
        Codes(bits, kind, levels)
