"""``linear`` and its C++ kernel against exact products."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.cpu import library as cpu_library
from llmjax.kernels.cpu import linear as cpu
from llmjax.kernels.cpu.library import library
from llmjax.kernels.dense_linear import LINEAR, linear_by_cublas
from llmjax.kernels.linear import linear
from tests.kernels.instruction_sets import INSTRUCTION_SETS, each_isa

NATIVE = library()

MAX_EXACT_ROWS = {"avx512bf16": 8, "amx": 16}  # of x that are not rounded to bf16


def product(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> np.ndarray:
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    return exact if bias is None else exact + np.asarray(bias, np.float64)


def normal(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype)))


@jax.jit
def products(xs: list[jax.Array], weight: jax.Array, added: jax.Array | None) -> list[jax.Array]:
    return [cpu.linear(x, weight, added) for x in xs]


@each_isa
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "size_out,size_in,bias", [(48, 64, True), (33, 96, False), (400, 40, True), (1, 8, False), (90, 592, True)]
)
def test_kernel(isa: str, dtype: str, size_out: int, size_in: int, bias: bool) -> None:
    weight, added = normal(1, size_out, size_in, dtype=dtype), normal(2, size_out) if bias else None
    xs = [normal(0, rows, size_in) for rows in (1, 2, 3, 7, 16, 19, 33)]
    for x, out in zip(xs, products(xs, weight, added), strict=True):
        assert out.dtype == jnp.float32
        # With tiles an element of x keeps 16 bits: relative 2^-17 of each of size_in terms.
        limit = (5e-4 if isa == "amx" else 2e-5) * max(1, size_in / 96)
        exact = MAX_EXACT_ROWS.get(isa, len(x)) if isa == "amx" or size_in % 32 == 0 else len(x)
        rounded = dtype == "bfloat16" and len(x) > exact
        np.testing.assert_allclose(out, product(x.astype(dtype) if rounded else x, weight, added), atol=limit)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("activations", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 3, 5, 40])
def test_any_types(dtype: str, activations: str, rows: int) -> None:
    x, weight, bias = normal(0, rows, 64, dtype=activations), normal(1, 32, 64, dtype=dtype), normal(2, 32)
    out = jax.jit(linear)(x, weight, bias)
    assert out.dtype == activations
    narrow = "bfloat16" in (dtype, activations)
    np.testing.assert_allclose(
        np.asarray(out, np.float64),
        product(x, weight, bias),
        atol=0.15 if narrow else 2e-2 if dtype == "float16" else 1e-5,
    )


@pytest.mark.parametrize("isa", [None, *INSTRUCTION_SETS])
def test_xla_takes_many_rows_where_vectors_multiply_bf16(isa: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if NATIVE is None:
        pytest.skip("the C++ library is not built")
    as_if = dataclasses.replace(NATIVE, forced=isa)
    monkeypatch.setattr(cpu_library, "_load", lambda: as_if)
    weight = normal(1, 32, 64, dtype="bfloat16")
    run = jax.jit(lambda x: linear(x, weight))  # a function of its own: traces are cached
    few, many = (run.lower(normal(0, rows, 64)).as_text() for rows in (1, 256))
    assert "llmjax_linears" in few
    assert ("llmjax_linears" in many) == (as_if.best != "avx512bf16")


@pytest.mark.parametrize("rows", [8, 40])
def test_rows_that_nobody_looks_at(rows: int) -> None:
    """They may hold anything, and change nothing in the others."""
    x, weight, bias = normal(0, rows, 64).at[5:].set(jnp.nan), normal(1, 32, 64, dtype="bfloat16"), normal(2, 32)
    found = np.asarray(jax.jit(linear)(x, weight, bias, jnp.int32(5)))
    expected = product(x[:5], weight, bias)
    np.testing.assert_allclose(found[:5], expected, atol=0.15)  # where XLA has tiles it rounds x as well
    if NATIVE is not None and "llmjax_linears" in jax.jit(linear).lower(x, weight, bias, jnp.int32(5)).as_text():
        assert not found[5:].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_that_a_card_stores_in_their_type_are_the_nearest(dtype: str) -> None:
    x, weight = normal(0, 80, 600, dtype=dtype), normal(1, 24, 600, dtype=dtype)
    found = np.asarray(jax.jit(linear_by_cublas)(x, weight))
    exact = product(x, weight)
    assert found.dtype == np.float32
    step = np.finfo(np.float16).eps if dtype == "float16" else 2.0**-7
    assert np.all(np.abs(found - exact) <= 0.51 * step * np.abs(exact) + 1e-4)


def test_a_card_rounds_the_sums_of_many_rows_without_a_bias_alone() -> None:
    def picked(rows: int, *, x: str = "bfloat16", weight: str = "bfloat16", bias: bool = False) -> str:
        added = jax.ShapeDtypeStruct((32,), jnp.float32) if bias else None
        arguments = [jax.ShapeDtypeStruct(shape, x_or_w) for shape, x_or_w in (((rows, 64), x), ((32, 64), weight))]
        return LINEAR.pick("gpu", *arguments, added).name

    assert picked(64) == "cuBLAS"
    assert picked(63) == picked(64, bias=True) == "XLA"
    assert picked(64, x="float32") == picked(64, x="float32", weight="float32") == "XLA"  # the head is in f32
    assert LINEAR.pick("cpu", jnp.zeros((64, 8), jnp.bfloat16), jnp.zeros((8, 8), jnp.bfloat16)).name != "cuBLAS"
