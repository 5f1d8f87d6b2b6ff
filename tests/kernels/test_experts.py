"""Products of experts against every token through every expert: choices of all kinds, plain and quantized stacks."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.kernels.experts import EXPERTS, blocks_of, experts, experts_by_blocks
from llmjax.kernels.experts_reference import experts_reference
from tests.kernels.experts_case import Maker

maker = partial(Maker, size=48, inner=40)


def check(found: jax.Array, expected: jax.Array) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=2e-5, atol=2e-5)


def marked(kind: str, tokens: int, choices: int) -> Any:
    """Every kind once, and in one of them every number of tokens and of choices; all together are slow."""
    fast = (tokens, choices) == (7, 2) or (kind == "float32" and (tokens == 7 or choices == 2))
    return pytest.param(kind, tokens, choices, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "tokens", "choices"),
    [marked(*case) for case in itertools.product(["float32", "q4", "columns"], [1, 2, 7, 64], [1, 2, 8])],
)
def test_against_the_reference(kind: str, tokens: int, choices: int) -> None:
    make = maker(kind, 8)
    x, weights = make.tokens(tokens), make.weights(bias=choices == 2)
    chosen, shares = make.choice(tokens, choices)
    found = jax.jit(partial(experts_by_blocks, activation="silu"))(x, chosen, shares, weights)
    check(found, experts_reference(x, chosen, shares, weights, activation="silu"))


def test_16_bit_activations_are_summed_in_f32() -> None:
    make = maker("bfloat16", 4)
    x, weights = make.tokens(5).astype(jnp.bfloat16), make.weights()
    chosen, shares = make.choice(5, 3)
    found = jax.jit(partial(experts, activation="gelu_pytorch_tanh"))(x, chosen, shares, weights)
    in_f32 = jax.jit(partial(experts_by_blocks, activation="gelu_pytorch_tanh"))
    wide = in_f32(x.astype(jnp.float32), chosen, shares, weights)
    assert found.dtype == jnp.bfloat16 and wide.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wide.astype(jnp.bfloat16)))
    # Products may round their inputs to the weights' type (`linear`), here those of `down`, by 2**-9 each at most.
    expected = experts_reference(x, chosen, shares, weights, activation="gelu_pytorch_tanh")
    assert np.linalg.norm(wide - expected) < 2**-9 * np.linalg.norm(expected)


@pytest.mark.parametrize("tokens", [3, 600])
def test_all_tokens_to_one_expert(tokens: int) -> None:
    make = maker("float32", 16)
    x, weights = make.tokens(tokens), make.weights()
    chosen, shares = jnp.full((tokens, 1), 11, jnp.int32), jnp.ones((tokens, 1))
    check(
        experts_by_blocks(x, chosen, shares, weights, activation="silu"),
        experts_reference(x, chosen, shares, weights, activation="silu"),
    )


def test_an_expert_that_is_chosen_twice_counts_twice() -> None:
    make = maker("float32", 4)
    x, weights = make.tokens(1), make.weights()
    chosen, shares = jnp.array([[2, 2]]), jnp.array([[0.25, 0.5]])
    check(
        experts_by_blocks(x, chosen, shares, weights, activation="silu"),
        experts_reference(x, chosen, shares, weights, activation="silu"),
    )


def test_experts_without_tokens_and_choices_without_share_are_not_looked_at() -> None:
    make = maker("float32", 4)
    x, weights = make.tokens(6), make.weights()
    chosen = jnp.array([[0, 3], [3, 1], [0, 0], [3, 0], [1, 2], [2, 2]], jnp.int32)
    shares = jnp.where(jnp.isin(chosen, jnp.array([1, 2])), 0.0, 0.5)
    poisoned: Any = jax.tree.map(lambda leaf: leaf.at[1:3].set(jnp.nan), weights)
    found = experts_by_blocks(x, chosen, shares, poisoned, activation="silu")
    check(found, experts_reference(x, chosen, shares, weights, activation="silu"))
    np.testing.assert_array_equal(found[4:], 0)


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 4), min_size=21, max_size=21),
    st.lists(st.sampled_from([0.0, 0.5]), min_size=21, max_size=21),
)
def test_blocks_hold_every_choice_with_a_share_once(chosen: list[int], shares: list[float]) -> None:
    blocks = blocks_of(jnp.array(chosen).reshape(7, 3), jnp.array(shares).reshape(7, 3), 5)
    found = []
    for i in range(int(blocks.count)):
        expert, rows, used = blocks.at(jnp.int32(i))
        assert used.any()
        found += [(int(row), int(expert)) for row, real in zip(rows, used, strict=True) if real]
    assert sorted(found) == [(i, expert) for i, expert in enumerate(chosen) if shares[i]]


def test_no_tokens() -> None:
    make = maker("float32", 2)
    empty = jnp.zeros((0, 1), jnp.int32)
    assert experts(make.tokens(0), empty, jnp.zeros((0, 1)), make.weights(), activation="silu").shape == (0, 48)


def test_the_last_implementation_takes_everything() -> None:
    assert EXPERTS.pick(None).run is experts_by_blocks
