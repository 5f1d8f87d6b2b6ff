"""Products with weights that have adapters, against the merged matrix of each row's own place."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.adapted import Adapted, Delta, Places, bias_columns
from llmjax.kernels.adapted_experts import adapted_experts
from llmjax.kernels.blocks import ExpertWeights, Projection
from llmjax.kernels.experts_reference import experts_reference
from llmjax.kernels.linear import linear, take_rows
from tests.kernels.experts_case import Maker

IN, OUT, RANK, PLACES = 24, 40, 3, 5
rng = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def places_of(of: list[int], *, gained: bool = False) -> Places:
    return Places(jnp.array(of, jnp.int32), jnp.array(gained), count=PLACES)


def delta_of(a: np.ndarray, b: np.ndarray, bias: np.ndarray | None = None, gain: np.ndarray | None = None) -> Delta:
    """Changes of ``a`` [S, r, in] and ``b`` [S, out, r]."""
    columns = np.zeros((b.shape[1], bias_columns(PLACES)), np.float32)
    if bias is not None:
        columns[:, :PLACES] = bias
    side_by_side = np.concatenate([*b, columns], axis=1)
    return Delta(jnp.asarray(a.reshape(-1, a.shape[-1])), jnp.asarray(side_by_side), gain)


def test_each_row_has_its_own_matrix() -> None:
    weight, x, bias = normal(OUT, IN), normal(6, IN), normal(OUT)
    a, b, own = normal(PLACES, RANK, IN), normal(PLACES, OUT, RANK), normal(OUT, PLACES)
    gain = normal(OUT, PLACES)
    of = [0, 3, 1, 0, 5, 3]
    for gained in (False, True):
        adapted = Adapted(jnp.asarray(weight), delta_of(a, b, own, jnp.asarray(gain)), places_of(of, gained=gained))
        found = jax.jit(linear)(x, adapted, jnp.asarray(bias))
        for row, place in enumerate(of):
            merged, added = weight, bias
            if place:
                factor = 1 + gain[:, place - 1, None] if gained else 1
                merged = factor * weight + b[place - 1] @ a[place - 1]
                added = bias + own[:, place - 1]
            np.testing.assert_allclose(found[row], merged @ x[row] + added, rtol=1e-5, atol=2e-4)


def test_what_nobody_looks_at_changes_no_other_row() -> None:
    """Rows after those in use may hold anything, also what is not a number."""
    a, b = normal(PLACES, RANK, IN), normal(PLACES, OUT, RANK)
    adapted = Adapted(jnp.asarray(normal(OUT, IN)), delta_of(a, b), places_of([2, 1]))
    x = normal(2, IN)
    expected = linear(jnp.asarray(x), adapted)
    x[1] = np.nan
    np.testing.assert_array_equal(np.asarray(linear(jnp.asarray(x), adapted))[0], np.asarray(expected)[0])


def test_looked_up_rows() -> None:
    vocabulary = 11
    weight, a, b = normal(vocabulary, OUT), normal(PLACES, RANK, vocabulary), normal(PLACES, OUT, RANK)
    plain = delta_of(a, b)
    delta = replace(plain, a=plain.a.T, b=plain.b[:, : PLACES * RANK])
    of, ids = [0, 4, 2], np.array([7, 0, 10], np.int32)
    found = take_rows(Adapted(jnp.asarray(weight), delta, places_of(of)), jnp.asarray(ids))
    for row, (place, number) in enumerate(zip(of, ids, strict=True)):
        expected = weight[number] + (b[place - 1] @ a[place - 1][:, number] if place else 0)
        np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-5)


def test_a_tied_head_has_an_adapter_of_its_own() -> None:
    weight, a, b = normal(OUT, IN), normal(PLACES, RANK, IN), normal(PLACES, OUT, RANK)
    tied = Adapted(jnp.asarray(weight), None, places_of([0, 0]), head=delta_of(a, b))
    x = normal(2, IN)
    found = linear(jnp.asarray(x), tied.as_head.at(jnp.array([0, 2])))
    np.testing.assert_allclose(found, np.stack([weight @ x[0], (weight + b[1] @ a[1]) @ x[1]]), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(take_rows(tied, jnp.array([3, 1])), weight[[3, 1]])


@pytest.mark.parametrize("repeated", [False, True])
def test_experts(repeated: bool) -> None:
    """Also where each choice of a token has an input of its own."""
    tokens, choices, count = 9, 2, 4
    make = Maker("float32", count, size=48, inner=40)
    x, weights = make.tokens(tokens), make.weights(bias=True)
    chosen, shares = make.choice(tokens, choices)
    of = [0, 1, 5, 1, 0, 2, 5, 5, 1]
    if repeated:
        x, chosen, shares = jnp.repeat(x, choices, axis=0), chosen.reshape(-1, 1), shares.reshape(-1, 1)
    deltas = {
        name: (0.2 * normal(PLACES, count, RANK, size_in), 0.2 * normal(PLACES, count, size_out, RANK))
        for name, (size_out, size_in) in {"gate": (40, 48), "up": (40, 48), "down": (48, 40)}.items()
    }

    def adapted(name: str) -> Projection:
        a, b = map(jnp.asarray, deltas[name])
        own: Projection = getattr(weights, name)
        return Projection(Adapted(own.weight, Delta(a, b), places_of(of)), own.bias)

    run = jax.jit(partial(adapted_experts, activation="silu"))
    found = run(x, chosen, shares, ExpertWeights(*map(adapted, ("gate", "up", "down"))))

    def merged(name: str, place: int) -> Projection:
        own: Projection = getattr(weights, name)
        a, b = (part[place - 1] for part in deltas[name])
        return Projection(own.weight + (b @ a if place else 0), own.bias)

    rows = np.repeat(of, choices) if repeated else np.array(of)
    for row, place in enumerate(rows.tolist()):
        one = slice(row, row + 1)
        with_own = ExpertWeights(*(merged(name, place) for name in ("gate", "up", "down")))
        expected = experts_reference(x[one], chosen[one], shares[one], with_own, activation="silu")
        np.testing.assert_allclose(np.asarray(found)[one], np.asarray(expected), rtol=1e-4, atol=1e-4)
