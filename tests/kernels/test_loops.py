"""Loops with a fixed number of iterations do what those that follow the data do."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.experts import blocks_of, experts_by_blocks
from llmjax.kernels.experts_reference import experts_reference
from llmjax.kernels.loops import bounded_loops, for_loop, while_loop
from tests.kernels.experts_case import Maker

pytestmark = pytest.mark.jax_api


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(("first", "end"), [(0, 0), (0, 7), (3, 5), (6, 7), (5, 2)])
def test_a_range(bounded: bool, first: int, end: int) -> None:
    def run(first: jax.Array, end: jax.Array) -> jax.Array:
        return for_loop(first, end, lambda i, x: x.at[i].add(i + 1), jnp.zeros(8, jnp.int32), most=7)

    with bounded_loops(bounded):
        found = jax.jit(run)(first, end)
    expected = np.where((np.arange(8) >= first) & (np.arange(8) < end), np.arange(8) + 1, 0)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("bounded", [False, True])
def test_until(bounded: bool) -> None:
    def run(limit: jax.Array) -> tuple[jax.Array, jax.Array]:
        start = (jnp.int32(1), jnp.int32(0))
        return while_loop(lambda carry: carry[0] < limit, lambda c: (c[0] * 2, c[1] + 1), start, most=10)

    with bounded_loops(bounded):
        assert [tuple(map(int, jax.jit(run)(limit))) for limit in (1, 2, 1000)] == [(1, 0), (2, 1), (1024, 10)]


def test_what_is_not_needed_is_not_computed() -> None:
    def run(x: jax.Array, end: jax.Array) -> jax.Array:
        return for_loop(0, end, lambda i, total: total + x[i], jnp.float32(0), most=4)

    with bounded_loops(True):
        assert jax.jit(run)(jnp.array([1.0, 2.0, jnp.nan, jnp.nan]), 2) == 3.0


@pytest.mark.parametrize(("tokens", "choices"), [(1, 2), (7, 2), (64, 8)])
def test_experts(tokens: int, choices: int) -> None:
    make = Maker("float32", 8, size=48, inner=40)
    x, weights = make.tokens(tokens), make.weights()
    chosen, shares = make.choice(tokens, choices)
    blocks = blocks_of(chosen, shares, 8)
    assert int(blocks.count) <= blocks.most <= tokens * choices
    with bounded_loops(True):
        found = jax.jit(partial(experts_by_blocks, activation="silu"))(x, chosen, shares, weights)
    expected = experts_reference(x, chosen, shares, weights, activation="silu")
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
