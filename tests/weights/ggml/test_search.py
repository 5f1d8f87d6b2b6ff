"""Searches for scales in C++ against those in NumPy, which ggml's own blocks prove: the same bits."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.kernels.cpu import searches as cpu
from llmjax.kernels.cpu.library import forced_isa, library
from llmjax.weights.ggml.reference import Q2_SEARCH, Q4_SEARCH, Q5_SEARCH
from llmjax.weights.ggml.search import (
    ALL_ZERO,
    AffineSearch,
    fit_affine_by_numpy,
    largest,
    symmetric_scale_by_numpy,
)

NATIVE = library()
ISAS = [isa for isa in ("generic", "avx2") if NATIVE is not None and isa in NATIVE.usable]
SEARCHES = {"q2_k": Q2_SEARCH, "q4_k": Q4_SEARCH, "q5_k": Q5_SEARCH}


def sub_blocks(seed: int, numbers: int, count: int) -> np.ndarray:
    """f32 [numbers, count], also of zeros, of one number, of one sign, with one far beyond the others, and whole."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((numbers, count)).astype(np.float32)
    x *= np.float32(10.0) ** rng.integers(-20, 18, count).astype(np.float32)
    for kind, column in zip(rng.integers(0, 7, count), x.T, strict=True):
        if kind == 0:
            column[...] = 0
        elif kind == 1:
            column[...] = column[0]
        elif kind == 2:
            column[...] = np.abs(column)
        elif kind == 3:
            column[...] = -np.abs(column)
        elif kind == 4:
            column[0] *= 1000
        elif kind == 5:
            column[...] = np.round(column)
    return x


def assert_same_bits(found: np.ndarray, expected: list[np.ndarray]) -> None:
    """But for the sign of zeros, which blocks do not keep, and what is not a number."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SEARCHES)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), numbers=st.sampled_from([16, 32]), count=st.integers(1, 40))
def test_affine(isa: str, name: str, seed: int, numbers: int, count: int) -> None:
    search: AffineSearch = SEARCHES[name]
    x = sub_blocks(seed, numbers, count)
    weights = np.abs(x) if search.absolute else np.abs(x) + np.float32(0.1)
    with np.errstate(all="ignore"):
        fit = fit_affine_by_numpy(x, weights, search)
    top, first, steps, absolute = search.top, search.first, search.steps, search.absolute
    with forced_isa(isa):
        found = cpu.fit_affine(x, weights, top=top, first=first, steps=steps, absolute=absolute)
    assert found is not None
    assert_same_bits(found, [fit.scale, fit.minimum, fit.origin, fit.multiplier])


@pytest.mark.parametrize("isa", ISAS)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 40))
def test_symmetric(isa: str, seed: int, count: int) -> None:
    x = sub_blocks(seed, 16, count)
    peak = largest(x)
    peak[np.abs(peak) < ALL_ZERO] = 1
    with np.errstate(all="ignore"):
        expected = symmetric_scale_by_numpy(x, peak, 32)
    with forced_isa(isa):
        found = cpu.fit_symmetric(x, peak, middle=32)
    assert found is not None
    assert_same_bits(found, list(expected))


@pytest.mark.skipif(NATIVE is None, reason="the kernels are not built")
def test_what_the_kernels_do_not_take_is_an_error() -> None:
    with pytest.raises(ValueError, match="too many numbers"):
        cpu.fit_symmetric(np.ones((33, 2), np.float32), np.ones(2, np.float32), middle=32)
    with pytest.raises(ctypes.ArgumentError, match="float32"):
        cpu.fit_symmetric(np.ones((16, 2)), np.ones(2, np.float32), middle=32)
