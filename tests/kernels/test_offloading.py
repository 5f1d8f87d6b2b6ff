"""Experts in two memories against all of them on the device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.kernels.adapted import Adapted, Delta, Places
from llmjax.kernels.blocks import ExpertWeights, Projection
from llmjax.kernels.experts import experts
from llmjax.kernels.experts_reference import experts_reference
from llmjax.kernels.offloading import HOST_MEMORY, SplitStack, experts_anywhere
from llmjax.kernels.qtensor import QTensor
from tests.kernels.experts_case import Maker

pytestmark = pytest.mark.jax_api

EXPERTS, CHOICES = 6, 2
maker = partial(Maker, count=EXPERTS, size=48, inner=40)


def check(found: jax.Array, expected: jax.Array) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=2e-5, atol=2e-5)


def split(weights: ExpertWeights, offloaded: int) -> ExpertWeights:
    resident = weights.count - offloaded
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=HOST_MEMORY)

    def one(projection: Projection) -> Projection:
        here = jax.tree.map(lambda leaf: leaf[:resident], projection.weight)
        there = jax.tree.map(lambda leaf: leaf[resident:], projection.weight)
        if not isinstance(there, QTensor):
            there = jax.lax.bitcast_convert_type(there, jnp.dtype(f"uint{8 * there.dtype.itemsize}"))
        return Projection(SplitStack(here, jax.device_put(there, host)), projection.bias)

    return ExpertWeights(one(weights.gate), one(weights.up), one(weights.down))


@pytest.mark.parametrize(
    "offloaded", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(5, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "q4", "columns"])
def test_as_on_the_device(kind: str, offloaded: int) -> None:
    make = maker(kind)
    x, weights = make.tokens(7), make.weights(bias=True)
    chosen, shares = make.choice(7, CHOICES)
    run = jax.jit(partial(experts_anywhere, activation="silu"))
    two = split(weights, offloaded)
    assert two.count == EXPERTS
    assert jax.tree.leaves(two.gate.weight.offloaded)[0].sharding.memory_kind == HOST_MEMORY
    check(run(x, chosen, shares, two), run(x, chosen, shares, weights))
    check(run(x, chosen, shares, two), experts_reference(x, chosen, shares, weights, activation="silu"))


@pytest.mark.parametrize("offloaded", [1, 4])
def test_adapters_as_on_the_device(offloaded: int) -> None:
    """Also of rows without one, and of an expert that rows with different adapters share."""
    make, rank = maker("float32"), 3
    x, weights, (chosen, shares) = make.tokens(9), make.weights(bias=True), make.choice(9, CHOICES)
    places = Places(jnp.array([0, 1, 2, 2, 0, 1, 1, 2, 0], jnp.int32), jnp.zeros(3, jnp.int32))
    deltas = {
        name: Delta(0.2 * make.floats(2, EXPERTS, rank, size_in), 0.2 * make.floats(2, EXPERTS, rank, size_out))
        for name, (size_out, size_in) in {"gate": (40, 48), "up": (40, 48), "down": (48, 40)}.items()
    }

    def adapted(weights: ExpertWeights) -> ExpertWeights:
        own = {name: getattr(weights, name) for name in deltas}
        return ExpertWeights(
            **{name: replace(one, weight=Adapted(one.weight, deltas[name], places)) for name, one in own.items()}
        )

    run = jax.jit(partial(experts_anywhere, activation="silu"))
    found = run(x, chosen, shares, adapted(split(weights, offloaded)))
    check(found, run(x, chosen, shares, adapted(weights)))
    plain = run(x, chosen, shares, weights)
    assert (np.abs(found - plain).max(axis=1) > 0.01).tolist() == (places.of != 0).tolist()


@pytest.mark.parametrize("offloaded", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_16_bit_activations_are_rounded_once(offloaded: int) -> None:
    """But for sums in another order, which few elements show."""
    make = maker("float32")
    x, weights, (chosen, shares) = make.tokens(64).astype(jnp.bfloat16), make.weights(), make.choice(64, 5)
    found = experts_anywhere(x, chosen, shares, split(weights, offloaded), activation="silu")
    whole = experts_anywhere(x, chosen, shares, weights, activation="silu")
    assert found.dtype == whole.dtype == jnp.bfloat16
    assert np.mean(np.asarray(found == whole)) > 0.99
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(whole, np.float32), rtol=2**-7, atol=1e-6)


MAKE = maker("float32")
WEIGHTS = MAKE.weights()
SPLIT = split(WEIGHTS, 3)
RUN = jax.jit(partial(experts_anywhere, activation="silu"))
WHOLE = jax.jit(partial(experts, activation="silu"))


@settings(max_examples=30)
@given(
    chosen=st.lists(st.tuples(*[st.integers(0, EXPERTS - 1)] * CHOICES), min_size=4, max_size=4),
    kept=st.lists(st.tuples(*[st.booleans()] * CHOICES), min_size=4, max_size=4),
)
def test_any_choice(chosen: list[tuple[int, ...]], kept: list[tuple[bool, ...]]) -> None:
    """All here, all there, nothing at all, one expert twice."""
    x, shares = MAKE.tokens(4), jnp.asarray(np.where(kept, 0.5, 0), jnp.float32)
    choice = jnp.asarray(chosen, jnp.int32)
    check(RUN(x, choice, shares, SPLIT), WHOLE(x, choice, shares, WEIGHTS))


def test_only_experts_in_use_are_fetched() -> None:
    """NaN in an expert that nobody chose would show."""
    make = maker("float32")
    weights = make.weights()
    broken = split(jax.tree.map(lambda leaf: leaf.at[4].set(jnp.nan), weights), 3)
    x, shares = make.tokens(2), jnp.full((2, CHOICES), 0.5)
    chosen = jnp.asarray([[0, 5], [3, 5]], jnp.int32)
    found = experts_anywhere(x, chosen, shares, broken, activation="silu")
    check(found, experts(x, chosen, shares, weights, activation="silu"))
