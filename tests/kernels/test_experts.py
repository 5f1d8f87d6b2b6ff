"""Products of experts against every token through every expert: choices of all kinds, plain and quantised stacks."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.blocks import Projection
from kernels.experts import EXPERTS, ExpertWeights, _blocks, experts, experts_by_blocks
from kernels.experts_reference import experts_reference
from kernels.qtensor import Codes, QTensor, RowFormat

SIZE, INNER = 48, 40


class Maker:
    """Random stacks of one kind: a dtype, ``q4``, ``columns``: codes in an order of each expert's own."""

    def __init__(self, kind: str, num_experts: int) -> None:
        self.kind, self.num_experts = kind, num_experts
        self.rng = np.random.default_rng(0)

    def floats(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.rng.standard_normal(shape), jnp.float32)

    def stack(self, size_out: int, size_in: int, *, bias: bool) -> Projection:
        added = self.floats(self.num_experts, size_out) if bias else None
        if self.kind not in ("q4", "columns"):
            return Projection((self.floats(self.num_experts, size_out, size_in) * 0.2).astype(self.kind), added)
        form = RowFormat(size_in, Codes(4), 16, "f32", zero=8)
        words = self.rng.integers(0, 1 << 32, (self.num_experts, -(-size_out // 16), form.num_words, 16), np.uint32)
        entry = form.fields["scales"]
        scales = self.rng.random((*words.shape[:2], entry.num_words, 16), np.float32) * 0.05
        words[:, :, entry.start : entry.start + entry.num_words] = scales.view(np.uint32)
        columns = None
        if self.kind == "columns":
            columns = jnp.asarray(
                self.rng.permuted(np.tile(np.arange(size_in, dtype=np.int32), (self.num_experts, 1)), axis=1)
            )
        return Projection(QTensor(jnp.asarray(words), columns, form, size_out, jnp.dtype(jnp.float32)), added)

    def weights(self, *, bias: bool = False) -> ExpertWeights:
        return ExpertWeights(
            gate=self.stack(INNER, SIZE, bias=bias),
            up=self.stack(INNER, SIZE, bias=bias),
            down=self.stack(SIZE, INNER, bias=bias),
        )

    def choice(self, tokens: int, choices: int) -> tuple[jax.Array, jax.Array]:
        chosen = np.stack([self.rng.permutation(self.num_experts)[:choices] for _ in range(tokens)])
        return jnp.asarray(chosen.astype(np.int32)), jnp.asarray(self.rng.random((tokens, choices), np.float32))


def check(found: jax.Array, expected: jax.Array, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["float32", "q4", "columns"])
@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
@pytest.mark.parametrize("choices", [1, 2, 8])
def test_against_the_reference(kind: str, tokens: int, choices: int) -> None:
    make = Maker(kind, 8)
    x, weights = make.floats(tokens, SIZE), make.weights(bias=choices == 2)
    chosen, shares = make.choice(tokens, choices)
    found = jax.jit(partial(experts_by_blocks, activation="silu"))(x, chosen, shares, weights)
    check(found, experts_reference(x, chosen, shares, weights, activation="silu"))


def test_16_bit_activations_are_summed_in_f32() -> None:
    make = Maker("bfloat16", 4)
    x, weights = make.floats(5, SIZE).astype(jnp.bfloat16), make.weights()
    chosen, shares = make.choice(5, 3)
    found = experts(x, chosen, shares, weights, activation="gelu_pytorch_tanh")
    assert found.dtype == jnp.bfloat16
    check(
        found.astype(jnp.float32),
        experts_reference(x, chosen, shares, weights, activation="gelu_pytorch_tanh"),
        tolerance=2e-2,
    )


@pytest.mark.parametrize("tokens", [3, 600])
def test_all_tokens_to_one_expert(tokens: int) -> None:
    make = Maker("float32", 16)
    x, weights = make.floats(tokens, SIZE), make.weights()
    chosen, shares = jnp.full((tokens, 1), 11, jnp.int32), jnp.ones((tokens, 1))
    check(
        experts_by_blocks(x, chosen, shares, weights, activation="silu"),
        experts_reference(x, chosen, shares, weights, activation="silu"),
    )


def test_an_expert_that_is_chosen_twice_counts_twice() -> None:
    make = Maker("float32", 4)
    x, weights = make.floats(1, SIZE), make.weights()
    chosen, shares = jnp.array([[2, 2]]), jnp.array([[0.25, 0.5]])
    check(
        experts_by_blocks(x, chosen, shares, weights, activation="silu"),
        experts_reference(x, chosen, shares, weights, activation="silu"),
    )


def test_experts_without_tokens_and_choices_without_share_are_not_looked_at() -> None:
    make = Maker("float32", 4)
    x, weights = make.floats(6, SIZE), make.weights()
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
    blocks = _blocks(jnp.array(chosen).reshape(7, 3), jnp.array(shares).reshape(7, 3), 5)
    found = []
    for i in range(int(blocks.count)):
        expert, rows, used = blocks.at(jnp.int32(i))
        assert used.any()
        found += [(int(row), int(expert)) for row, real in zip(rows, used, strict=True) if real]
    assert sorted(found) == [(i, expert) for i, expert in enumerate(chosen) if shares[i]]


def test_no_tokens() -> None:
    make = Maker("float32", 2)
    empty = jnp.zeros((0, 1), jnp.int32)
    assert experts(make.floats(0, SIZE), empty, jnp.zeros((0, 1)), make.weights(), activation="silu").shape == (0, SIZE)


def test_the_last_implementation_takes_everything() -> None:
    assert EXPERTS.pick(None).run is experts_by_blocks
