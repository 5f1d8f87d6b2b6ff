"""Products with weights that have adapters, against the merged matrix of each row's own place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.adapted import Adapted, Delta, Places
from llmjax.kernels.adapted_experts import ADAPTED_EXPERTS, adapted_experts
from llmjax.kernels.adapted_linear import CHANGED
from llmjax.kernels.blocks import ExpertWeights, Projection
from llmjax.kernels.cpu import experts as cpu_experts
from llmjax.kernels.cpu.library import library
from llmjax.kernels.experts_reference import experts_reference
from llmjax.kernels.linear import linear, take_rows
from llmjax.kernels.qtensor import QTensor
from llmjax.kernels.registry import Operation
from tests.kernels.experts_case import Maker
from tests.kernels.instruction_sets import each_isa

IN, OUT, RANK, PLACES = 24, 40, 3, 5
rng = np.random.default_rng(0)


def way_of(name: str, operation: Operation = CHANGED) -> Callable[..., jax.Array]:
    if name == "C++" and library() is None:
        pytest.skip("the C++ kernels are not built")
    return {one.name: one.run for one in operation.implementations}[name]


def normal(*shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def places_of(of: list[int], *, special: tuple[int, ...] = ()) -> Places:
    flags = np.isin(np.arange(PLACES + 1), special).astype(np.int32)
    return Places(jnp.array(of, jnp.int32), jnp.asarray(flags))


def delta_of(a: np.ndarray, b: np.ndarray, bias: np.ndarray | None = None, gain: np.ndarray | None = None) -> Delta:
    """Changes of ``a`` [S, r, in] and ``b`` [S, out, r], with a bias and gains less one [S, out]."""
    zeros = np.zeros((PLACES, b.shape[1]), np.float32)
    vectors = np.concatenate([zeros if one is None else one for one in (bias, gain)])
    side_by_side = b.swapaxes(1, 2).reshape(-1, b.shape[1])
    return Delta(jnp.asarray(a.reshape(-1, a.shape[-1])), jnp.asarray(side_by_side), jnp.asarray(vectors))


@pytest.mark.parametrize("way", ["C++", "XLA, side by side"])
@pytest.mark.parametrize(("size_in", "size_out"), [(24, 40), (43, 133)])
def test_each_row_has_its_own_matrix(way: str, size_in: int, size_out: int) -> None:
    weight, x, base = normal(size_out, size_in), normal(6, size_in), normal(size_out)
    a, b = normal(PLACES, RANK, size_in), normal(PLACES, size_out, RANK)
    of, special = [0, 3, 1, 0, 5, 3], (3, 5)
    has = np.isin(np.arange(1, PLACES + 1), special)[:, None]
    bias, gain = (has * normal(PLACES, size_out) for _ in range(2))
    run = way_of(way)
    delta, places = delta_of(a, b, bias, gain), places_of(of, special=special)
    found = jax.jit(run)(jnp.asarray(x @ weight.T + base), jnp.asarray(x), delta, places)
    for row, place in enumerate(of):
        expected = weight @ x[row] + base
        if place:
            own = place - 1
            expected = expected * (1 + gain[own]) + bias[own] + b[own] @ (a[own] @ x[row])
        np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("way", ["C++", "XLA, side by side"])
def test_16_bit_adapters(way: str) -> None:
    """What is between the two products is not rounded."""
    a, b = normal(PLACES, RANK, IN), normal(PLACES, OUT, RANK)
    x, of = normal(3, IN), [2, 4, 2]
    delta = delta_of(a, b)
    narrow = replace(delta, a=delta.a.astype(jnp.bfloat16), b=delta.b.astype(jnp.bfloat16))
    wide = replace(narrow, a=narrow.a.astype(jnp.float32), b=narrow.b.astype(jnp.float32))
    x = np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))  # XLA's dot rounds it to the type of ``a``
    run = way_of(way)
    zeros = jnp.zeros((3, OUT))
    found, expected = (jax.jit(run)(zeros, jnp.asarray(x), one, places_of(of)) for one in (narrow, wide))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@each_isa
@pytest.mark.parametrize("rank", [RANK, 10])
def test_many_rows_of_a_place(isa: str, rank: int) -> None:
    """Rows of a place are computed some at a time, to the same bits however many there are, and ranks likewise."""
    size_in, size_out, rows = 76, 1100, 201
    a, b, x = normal(PLACES, rank, size_in), normal(PLACES, size_out, rank), normal(rows, size_in)
    of = [1 if t % 3 else t % 4 for t in range(rows)]
    delta = delta_of(a, b)
    run = jax.jit(way_of("C++"))
    found = np.asarray(run(jnp.zeros((rows, size_out)), jnp.asarray(x), delta, places_of(of)))
    expected = np.stack([b[of[t] - 1] @ (a[of[t] - 1] @ x[t]) * (of[t] != 0) for t in range(rows)])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
    for t in (1, 65, 198):
        alone = run(jnp.zeros((1, size_out)), jnp.asarray(x[t : t + 1]), delta, places_of([of[t]]))
        np.testing.assert_array_equal(found[t], np.asarray(alone)[0])


def test_the_bias_is_added_after_the_change() -> None:
    a, b, x = normal(PLACES, RANK, IN), normal(PLACES, OUT, RANK), normal(2, IN)
    weight, bias, gain = normal(OUT, IN), normal(OUT), normal(PLACES, OUT)
    adapted = Adapted(jnp.asarray(weight), delta_of(a, b, gain=gain), places_of([0, 2], special=(2,)))
    found = jax.jit(linear)(x, adapted, jnp.asarray(bias))
    own = (1 + gain[1]) * (weight @ x[1]) + b[1] @ (a[1] @ x[1]) + bias
    np.testing.assert_allclose(found, np.stack([weight @ x[0] + bias, own]), rtol=1e-5, atol=2e-4)


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
    delta = replace(plain, a=plain.a.T, vectors=None)
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


EXPERTS, SIZE, INNER = 4, 48, 40
OF = [0, 1, 5, 1, 0, 2, 5, 5, 1]  # the places of the rows of x


@dataclass(frozen=True)
class Mixture:
    """Experts of one kind, and adapters of their matrices."""

    make: Maker
    weights: ExpertWeights
    deltas: dict[str, tuple[np.ndarray, np.ndarray]]  # a [S, E, r, in] and b [S, E, out, r]

    @classmethod
    def of(cls, kind: str) -> Mixture:
        make = Maker(kind, EXPERTS, size=SIZE, inner=INNER)
        sizes = {"gate": (INNER, SIZE), "up": (INNER, SIZE), "down": (SIZE, INNER)}
        deltas = {
            name: (0.2 * normal(PLACES, EXPERTS, RANK, size_in), 0.2 * normal(PLACES, EXPERTS, size_out, RANK))
            for name, (size_out, size_in) in sizes.items()
        }
        return cls(make, make.weights(bias=True), deltas)

    def adapted(self, of: list[int], *, dtype: str = "float32") -> ExpertWeights:
        """The weights with the adapters of rows at these places."""

        def one(name: str) -> Projection:
            a, b = self.deltas[name]
            own: Projection = getattr(self.weights, name)
            delta = Delta(jnp.asarray(a, dtype), jnp.asarray(b.swapaxes(2, 3), dtype))
            return Projection(Adapted(own.weight, delta, places_of(of)), own.bias)

        return ExpertWeights(*map(one, ("gate", "up", "down")))

    def merged(self, place: int) -> ExpertWeights:
        """The weights that a place's adapter makes of them."""

        def one(name: str) -> Projection:
            own: Projection = getattr(self.weights, name)
            a, b = (part[place - 1] for part in self.deltas[name])
            weight = own.weight.dequantize() if isinstance(own.weight, QTensor) else own.weight
            return Projection(weight.astype(jnp.float32) + (b @ a if place else 0), own.bias)

        return ExpertWeights(*map(one, ("gate", "up", "down")))

    def expected(self, x: jax.Array, chosen: jax.Array, shares: jax.Array, of: list[int]) -> np.ndarray:
        """Each row through the experts with its own adapter merged into them."""
        rows = [
            experts_reference(x[t][None], chosen[t][None], shares[t][None], self.merged(place), activation="silu")
            for t, place in enumerate(of)
        ]
        return np.concatenate(rows)


@pytest.mark.parametrize("way", ["C++", "XLA, by blocks"])
@pytest.mark.parametrize("kind", ["float32", "q4"])
def test_experts(way: str, kind: str) -> None:
    mixture, run = Mixture.of(kind), partial(way_of(way, ADAPTED_EXPERTS), activation="silu")
    x, (chosen, shares) = mixture.make.tokens(len(OF)), mixture.make.choice(len(OF), 2)
    found = jax.jit(run)(x, chosen, shares, mixture.adapted(OF))
    np.testing.assert_allclose(found, mixture.expected(x, chosen, shares, OF), rtol=1e-4, atol=2e-4)


def test_each_choice_has_an_input_of_its_own() -> None:
    mixture = Mixture.of("float32")
    x = jnp.repeat(mixture.make.tokens(len(OF)), 2, axis=0)
    chosen, shares = (one.reshape(-1, 1) for one in mixture.make.choice(len(OF), 2))
    found = jax.jit(partial(adapted_experts, activation="silu"))(x, chosen, shares, mixture.adapted(OF))
    expected = mixture.expected(x, chosen, shares, np.repeat(OF, 2).tolist())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


RUN_EXPERTS = jax.jit(partial(cpu_experts.experts, activation="silu"))


@each_isa
@pytest.mark.parametrize("kind", ["q4", "bfloat16", "rounding"])
def test_experts_of_other_rows_change_nothing(isa: str, kind: str) -> None:
    """A row's sum has the same bits whatever adapters others have, also if it has none where tiles round nothing."""
    mixture = Mixture.of(kind)
    x, (chosen, shares) = mixture.make.tokens(len(OF)), mixture.make.choice(len(OF), 2)
    found = np.asarray(RUN_EXPERTS(x, chosen, shares, mixture.adapted(OF, dtype="bfloat16")))
    others = [place if place in (0, 5) else 0 for place in OF]
    again = np.asarray(RUN_EXPERTS(x, chosen, shares, mixture.adapted(others, dtype="bfloat16")))
    kept = np.isin(OF, (0, 5))
    np.testing.assert_array_equal(found[kept], again[kept])
    assert (found[~kept] != again[~kept]).any(axis=1).all()
    if isa != "amx":
        alone = np.asarray(RUN_EXPERTS(x, chosen, shares, mixture.weights))
        np.testing.assert_array_equal(found[np.array(OF) == 0], alone[np.array(OF) == 0])
    far = found - mixture.expected(x, chosen, shares, OF)
    assert np.linalg.norm(far) < 0.03 * np.linalg.norm(found)


def test_a_place_that_does_not_exist_is_an_error() -> None:
    if library() is None:
        pytest.skip("the C++ kernels are not built")
    mixture = Mixture.of("float32")
    x, (chosen, shares) = mixture.make.tokens(1), mixture.make.choice(1, 2)
    with pytest.raises(Exception, match="there is no such place"):
        RUN_EXPERTS(x, chosen, shares, mixture.adapted([PLACES + 1])).block_until_ready()
