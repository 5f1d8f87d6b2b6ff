"""Groups of any size in any order: the pieces of a layout together are its formula on every column."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.checkpoint.formats.layout import Layout, StoredRows, Unsigned, scale_type
from llmjax.kernels.row_format import Codes


@dataclass(frozen=True)
class Matrix:
    """A layout, random rows of it and the f32 weights they mean."""

    layout: Layout
    stored: StoredRows
    weights: np.ndarray


def matrix(size_in: int, group_size: int, group_of: np.ndarray | None) -> Matrix:
    rng = np.random.default_rng(size_in)
    each = np.arange(size_in) // group_size if group_of is None else group_of
    groups = each.max() + 1
    codes = rng.integers(0, 16, (3, size_in)).astype(np.uint8)
    scales = rng.random((3, groups)).astype(np.float16)
    zeros = rng.integers(0, 16, (3, groups)).astype(np.uint8)
    weights = (codes.astype(np.float32) - zeros[:, each]) * scales.astype(np.float32)[:, each]
    layout = Layout(size_in, Codes(4), group_size, "f16", zero="u8", group_of=group_of)
    return Matrix(layout, StoredRows(codes, scales, zeros), weights)


def dequantize(case: Matrix) -> np.ndarray:
    out = np.full(case.weights.shape, np.nan, np.float32)
    for piece in case.layout.pieces:
        piece.dequantize(case.stored, out)
    return out


@st.composite
def orders(draw: st.DrawFn) -> np.ndarray | None:
    sizes = draw(st.lists(st.sampled_from([0, 1, 16, 32]), min_size=1, max_size=4))
    sizes[-1] = max(1, sizes[-1])
    if draw(st.booleans()):
        sizes = [16] * len(sizes)
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))


@given(order=orders())
@settings(max_examples=60)
def test_columns_in_any_order(order: np.ndarray) -> None:
    case = matrix(len(order), 16, order)
    assert np.array_equal(dequantize(case), case.weights)
    assert (len(case.layout.pieces) == 1) == (not case.layout.problem or len(set(order.tolist())) == 1)
    for piece in case.layout.pieces:
        assert piece.columns is not None and (np.diff(order[piece.columns]) >= 0).all()


@given(size_in=st.integers(1, 130), group_size=st.integers(1, 140))
@settings(max_examples=60)
def test_groups_of_any_size(size_in: int, group_size: int) -> None:
    case = matrix(size_in, group_size, None)
    assert np.array_equal(dequantize(case), case.weights)
    assert bool(case.layout.problem) == (group_size < size_in and group_size % 16 > 0)
    assert case.layout.problem or case.layout.pieces[0].columns is None


@pytest.mark.parametrize(
    ("size_in", "group_size", "order", "problem"),
    [
        (40, 48, None, ""),
        (40, 16, None, ""),  # a short last group
        (40, 24, None, "its groups of 24 columns are not a multiple of 16"),
        (32, 16, [0] * 15 + [1] * 17, "its groups of columns have sizes from 15 to 17"),
        (32, 16, [0] * 16 + [2] * 16, "its groups of columns have sizes from 0 to 16"),
        (40, 16, [2] * 8 + [1] * 16 + [0] * 16, ""),
    ],
)
def test_what_records_cannot_hold(size_in: int, group_size: int, order: list[int] | None, problem: str) -> None:
    group_of = None if order is None else np.array(order)
    assert matrix(size_in, group_size, group_of).layout.problem == problem


def test_a_single_group_is_rounded_up() -> None:
    assert matrix(40, 64, None).layout.pieces[0].format.group_size == 48


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_seven_and_eight_bits_are_kept_with_a_sign(bits: int) -> None:
    form = Unsigned(bits)
    values = np.arange(1 << bits).astype(np.uint8)
    kept = form.keep(values)
    assert np.array_equal(kept.astype(int) + form.offset, values)
    assert form.codes == (Codes(8, "int") if bits > 6 else Codes(bits)) and str(kept.dtype)[0] == form.zero_type[0]


def test_types_of_scales() -> None:
    assert [scale_type(np.dtype(kind)) for kind in ("f2", "f4", "f8")] == ["f16", "f32", "f32"]
