"""Packed codes against Python's own whole numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.weights.bits import pack_bits, unpack_bits


@settings(max_examples=60)
@given(st.integers(1, 8), st.integers(1, 70), st.data())
def test_a_row_is_one_long_number(bits: int, count: int, data: st.DataObject) -> None:
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count))
    stream = sum(code << bits * k for k, code in enumerate(codes))
    words = -(-count * bits // 32)
    packed = np.frombuffer(stream.to_bytes(4 * words, "little") * 2, "<i4").reshape(2, words)
    unpacked = unpack_bits(packed, bits, count)
    assert unpacked.dtype == np.uint8
    assert unpacked.tolist() == [codes, codes]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_views_that_are_not_contiguous(bits: int) -> None:
    words = np.random.default_rng(0).integers(0, 2**32, (24, 6), dtype=np.uint32).view(np.int32)
    count = 24 * 32 // bits
    assert np.array_equal(unpack_bits(words.T, bits, count), unpack_bits(words.T.copy(), bits, count))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 70), st.integers(0, 2**32))
def test_packing_is_the_inverse(bits: int, rows: int, count: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, count)).astype(np.uint8)
    packed = pack_bits(codes, bits)
    assert packed.dtype == np.int32 and packed.shape == (rows, -(-count * bits // 32))
    assert np.array_equal(unpack_bits(packed, bits, count), codes)
    stream = sum(int(code) << bits * k for k, code in enumerate(codes[0]))
    assert int.from_bytes(packed[0].tobytes(), "little") == stream
