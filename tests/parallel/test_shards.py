"""Parts of quantized matrices stand for the same weights as those parts of the whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.kernels.row_format import Codes, RowFormat
from llmjax.models.layers.shares import NOTHING, HeadShares, even_share, inner_share, of_entries, spread_share
from llmjax.parallel.division import Cut
from llmjax.parallel.shards import cut_array, cut_source, format_of_columns
from llmjax.weights.packing import RowStack
from llmjax.weights.rows import CODE_DTYPES, NUMBER_DTYPES, QuantizedRows

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FORMATS = {
    "q4_0": RowFormat(192, Codes(4), 32, "f16", zero=8),
    "q4_k": RowFormat(512, Codes(4), 32, "u8", minimum="u8", super_size=256),
    "q6_k": RowFormat(512, Codes(6), 16, "i8", zero=32, super_size=256),
    "gptq": RowFormat(256, Codes(4), 64, "f16", zero="u8"),
    "fp8 rows": RowFormat(200, Codes(8, "e4m3"), 208, "f32"),
    "mxfp4": RowFormat(192, Codes(4, levels=LEVELS), 32, "e8m0"),
}


@dataclass(frozen=True, eq=False)
class Whole:
    """Rows of random codes and scales, which may be asked for at multiples of ``row_step`` alone."""

    rows: QuantizedRows
    row_step: int = 4
    columns: np.ndarray | None = None

    @property
    def format(self) -> RowFormat:
        return self.rows.format

    @property
    def size_out(self) -> int:
        return len(self.rows.codes)

    def quantized_rows(self, start: int, stop: int) -> QuantizedRows:
        assert start % self.row_step == 0
        names = ("codes", *self.format.fields)
        return QuantizedRows(format=self.format, **{name: getattr(self.rows, name)[start:stop] for name in names})


def matrix(name: str, rows: int, *, columns: np.ndarray | None = None) -> Whole:
    form, rng = FORMATS[name], np.random.default_rng(len(name))
    kind = CODE_DTYPES[form.codes.kind]
    codes = rng.integers(0, 1 << form.codes.bits, (rows, form.size_in)).astype(np.uint8)
    codes = (codes % 0x78).view(kind) if form.codes.kind == "e4m3" else codes.astype(kind)
    numbers = {}
    for field, run in form.fields.items():
        dtype = NUMBER_DTYPES[run.number]
        bits = rng.integers(1, 100, (rows, run.count))
        numbers[field] = (bits.astype(np.uint8).view(dtype) if run.number == "e8m0" else bits.astype(dtype)).copy()
    return Whole(QuantizedRows(format=form, codes=codes, **numbers), columns=columns)


def weights(source: Any) -> np.ndarray:
    """f32 [rows, columns], or of a stack [matrices, rows, columns]."""
    if isinstance(source, RowStack):
        return np.stack([weights(source.matrix(index)) for index in range(source.count)])
    out = np.empty((source.size_out, source.format.size_in), np.float32)
    source.quantized_rows(0, source.size_out).dequantize(out)
    return out


@pytest.mark.parametrize("name", FORMATS)
def test_some_rows(name: str) -> None:
    whole = matrix(name, 40)
    cut = Cut(0, of_entries(HeadShares(2, 5, 3).share_of_queries, 4))
    for device in range(3):
        part = cut_source(whole, cut, device)
        assert np.array_equal(weights(part), cut_array(weights(whole), cut, device))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("devices", [2, 3])
def test_some_columns(name: str, devices: int) -> None:
    whole, size = matrix(name, 12), FORMATS[name].size_in
    cut = Cut(1, inner_share(size, devices))
    form = format_of_columns(whole.format, cut.entries)
    assert form is not None and form.size_in == cut.entries.shape[1]
    for device in range(devices):
        part = cut_source(whole, cut, device)
        assert part is not None and part.format == form  # programs see one format on all devices
        assert np.array_equal(weights(part), cut_array(weights(whole), cut, device))


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 4),
    devices=st.integers(1, 5),
)
def test_columns_of_heads(name: str, kv_heads: int, group: int, devices: int) -> None:
    whole = matrix(name, 4)
    size = whole.format.size_in // (kv_heads * group)
    entries = of_entries(HeadShares(kv_heads, group, devices).share_of_queries, size)
    cut = Cut(1, np.where(entries < whole.format.size_in, entries, NOTHING))
    for device in range(devices):
        part = cut_source(whole, cut, device)
        if part is None:  # a head has fewer columns than a group may
            assert size % 16
            return
        assert np.array_equal(weights(part), cut_array(weights(whole), cut, device))


def test_groups_stay_as_large_as_they_can_be() -> None:
    form = format_of_columns(FORMATS["q4_k"], even_share(512, 2))
    assert form is not None and (form.group_size, form.super_size) == (32, 256)
    form = format_of_columns(replace(FORMATS["q4_k"], size_in=768), even_share(768, 2))
    assert form is not None and (form.group_size, form.super_size) == (32, 128)
    form = format_of_columns(FORMATS["gptq"], even_share(240, 3))
    assert form is not None and form.group_size == 16
    assert format_of_columns(FORMATS["gptq"], even_share(216, 3)) is None


def test_columns_in_an_order_of_their_own_are_not_cut() -> None:
    order = np.random.default_rng(0).permutation(256)
    whole = matrix("gptq", 8, columns=order)
    assert cut_source(whole, Cut(1, even_share(256, 2)), 0) is None
    rows = Cut(0, even_share(8, 2))
    assert np.array_equal(weights(cut_source(whole, rows, 1)), weights(whole)[4:])


def test_each_matrix_of_a_stack_is_cut() -> None:
    matrices = [matrix("q4_0", 8), matrix("q4_0", 8, columns=None)]
    stack = RowStack(2, matrices.__getitem__)
    for cut in (Cut(1, even_share(8, 3)), Cut(2, inner_share(192, 3))):
        part = cut_source(stack, cut, 1)
        assert np.array_equal(weights(part), cut_array(weights(stack), cut, 1))


@pytest.mark.parametrize("name", FORMATS)
def test_some_matrices_of_a_stack(name: str) -> None:
    matrices = [matrix(name, 20), replace(matrix(name, 20), row_step=1)]
    stack = RowStack(2, matrices.__getitem__)
    cut = Cut(0, spread_share(2, 3))
    for device in range(3):
        part = cut_source(stack, cut, device)
        assert isinstance(part, RowStack) and part.columns is None
        assert np.array_equal(weights(part), cut_array(weights(stack), cut, device))


def test_matrices_in_orders_of_their_own_are_so_on_all_devices() -> None:
    order = np.random.default_rng(0).permutation(256)
    matrices = [matrix("gptq", 8), matrix("gptq", 8, columns=order), matrix("gptq", 8)]
    stack = RowStack(3, matrices.__getitem__)
    cut, in_order = Cut(0, spread_share(3, 4)), np.arange(256)
    for device, expected in enumerate((in_order, in_order, order, in_order)):
        part = cut_source(stack, cut, device)
        assert part is not None and part.columns is not None and np.array_equal(part.columns, expected[None])
        assert np.array_equal(weights(part), cut_array(weights(stack), cut, device))
