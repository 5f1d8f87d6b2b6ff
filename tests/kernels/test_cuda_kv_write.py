"""The kernel that stores keys and values, run as XLA operations, against the reference."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.attention import reference
from llmjax.kernels.attention.types import KVPages
from llmjax.kernels.cuda.attention import CACHE_TYPES
from llmjax.kernels.cuda.kv_write import FLOAT8, float8_bits, write_kv
from tests.kernels.attention_case import Case, filled_pages, make_data, owned

MIX = ((1, 50), (0, 0), (13, 13), (9, 30))
CALIBRATION = ((0.03, 0.25), (0.02, -0.5))
CASES = {
    **{name: Case(MIX, cache=name, head_dim=40) for name in CACHE_TYPES},
    "bf16 into bf16": Case(MIX, cache="bfloat16", activations="bfloat16"),
    "calibrated": Case(MIX, cache="int8", calibration=CALIBRATION, page_size=3),
    "one decode": Case(((1, 5),), decode=True, cache="int8", padding=0, head_dim=8),
    "latent": Case(MIX, heads=2, kv_heads=1, head_dim=48, value_dim=32, cache="float8_e4m3fn"),
}


def written(case: Case, *, interpret: bool = True) -> tuple[KVPages, KVPages]:
    """By the kernel and by the reference."""
    data = make_data(case)
    pages = filled_pages(case, data.filling, as_bits=False)
    k, v = data.q[:, : case.kv_heads], data.v
    found = jax.jit(partial(write_kv, interpret=interpret))(pages, k, v, data.batch)
    return found, reference.write_kv(pages, k, v, data.batch.places(case.page_size))


@pytest.mark.parametrize("name", ["int8", "float8_e5m2", "bf16 into bf16", "calibrated", "latent"])
def test_stores_the_same_bits(name: str) -> None:
    found, expected = written(CASES[name])
    assert found.data.dtype == expected.data.dtype
    bits = [owned(CASES[name], pages.data).view(np.uint8) for pages in (found, expected)]
    np.testing.assert_array_equal(bits[0], bits[1])


@pytest.mark.parametrize("kind", FLOAT8)
def test_8_bit_floats_are_the_nearest(kind: str) -> None:
    """Every code, what lies halfway between two, and next to that; against ml_dtypes."""
    codes = np.arange(256, dtype=np.uint8).view(jnp.dtype(kind)).astype(np.float32)
    codes = np.sort(codes[np.isfinite(codes)])
    middle = (codes[1:] + codes[:-1]) / 2
    values = np.concatenate([codes, middle, *(np.nextafter(middle, np.float32(to)) for to in (-1e9, 1e9))])
    values = values[np.abs(values) <= codes.max()]
    found = np.asarray(jax.jit(partial(float8_bits, kind=kind))(values))
    np.testing.assert_array_equal(found, values.astype(jnp.dtype(kind)).view(np.uint8))


@pytest.mark.parametrize("kind", FLOAT8)
def test_8_bit_floats_keep_nan(kind: str) -> None:
    found = np.asarray(jax.jit(partial(float8_bits, kind=kind))(np.array([np.nan, -np.nan, 1], np.float32)))
    np.testing.assert_array_equal(np.isnan(found.view(jnp.dtype(kind)).astype(np.float32)), [True, True, False])


def check_nearly_same(case: Case, found: KVPages, expected: KVPages) -> None:
    """Up to the last bit of a reciprocal, which may move a number to the next code, and of what codes stand for."""
    values = [np.asarray(pages.decode(np.moveaxis(owned(case, pages.data), 1, 0))) for pages in (found, expected)]
    step = {"int8": 1 / 127, "float8_e4m3fn": 1 / 8, "float8_e5m2": 1 / 4}.get(found.dtype.name, 0)
    assert (np.abs(values[0] - values[1]) <= (1 + 1e-5) * step * np.abs(values[1]).max(-1, keepdims=True)).all()
    assert (values[0] == values[1]).mean() > 0.999


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_stores_the_same_on_a_card(name: str, cuda_device: jax.Device) -> None:
    check_nearly_same(CASES[name], *written(CASES[name], interpret=False))
