"""Experts in C++ against the specification: instruction sets, plain and quantized stacks, all kinds of choices."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.activations import CLAMPED_SWIGLU
from llmjax.kernels.cpu import experts as cpu
from llmjax.kernels.cpu.library import library
from llmjax.kernels.experts import EXPERTS
from llmjax.kernels.experts_reference import experts_reference
from tests.kernels.experts_case import Maker
from tests.kernels.instruction_sets import each_isa

pytestmark = pytest.mark.skipif(library() is None, reason="the C++ kernels are not built")

SIZE, COUNT = 72, 6
maker = partial(Maker, count=COUNT, size=SIZE, inner=104)  # neither size a multiple of the widest vectors


@cache
def jitted(activation: str) -> Any:
    """Compiled once for all instruction sets."""
    return jax.jit(partial(cpu.experts, activation=activation))


def check(found: jax.Array, expected: np.ndarray, *, rounded: bool = False) -> None:
    """Where tiles multiply plain matrices, an element of x keeps 16 bits, or 8 if an expert has many rows (rounded)."""
    np.testing.assert_allclose(np.asarray(found), expected, rtol=2e-4, atol=6e-2 if rounded else 4e-3)


@each_isa
@pytest.mark.parametrize("kind", ["q4", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "choices", "activation", "bias"),
    [
        (1, 1, "silu", False),
        (1, 4, "silu", True),
        (3, 2, "gelu_pytorch_tanh", False),
        (40, 6, "quick_gelu", True),
    ],
)
def test_against_the_reference(isa: str, kind: str, rows: int, choices: int, activation: str, bias: bool) -> None:
    arguments, expected = specified(kind, rows, choices, activation, bias)
    run = jitted(activation)
    check(run(*arguments), expected, rounded=isa == "amx" and kind == "bfloat16" and rows > 16)


@each_isa
@pytest.mark.parametrize("kind", ["q4", "bfloat16"])
def test_clamped_gates(isa: str, kind: str) -> None:
    """Inputs so large that most gates, and what they gate, are clamped."""
    make = maker(kind)
    arguments = 10 * make.tokens(20), *make.choice(20, 2), make.weights(bias=True)
    run = jitted(CLAMPED_SWIGLU)
    expected = experts_reference(*arguments, activation=CLAMPED_SWIGLU)
    np.testing.assert_allclose(np.asarray(run(*arguments)), expected, rtol=2e-3, atol=0.1)


@lru_cache(maxsize=1)
def specified(kind: str, rows: int, choices: int, activation: str, bias: bool) -> tuple[tuple[Any, ...], np.ndarray]:
    """Arguments, and what the reference makes of them; the same for all instruction sets."""
    make = maker(kind)
    x, weights, (chosen, shares) = make.tokens(rows), make.weights(bias=bias), make.choice(rows, choices)
    arguments = x, chosen, shares, weights
    return arguments, experts_reference(*arguments, activation=activation)


@dataclass(frozen=True)
class Rounded:
    """Experts whose inputs may be rounded to int8, each with a number of rows."""

    loads: tuple[int, ...]
    size: int
    inner: int
    choices: int
    activation: str
    bias: bool

    @cached_property
    def arguments(self) -> tuple[Any, ...]:
        make = Maker("rounding", len(self.loads), size=self.size, inner=self.inner)
        chosen, shares = make.choice_with_loads(self.loads, self.choices)
        return make.tokens(len(chosen)), chosen, shares, make.weights(bias=self.bias)

    @cached_property
    def expected(self) -> np.ndarray:
        return experts_reference(*self.arguments, activation=self.activation)


MANY, FEW = (1, 5, 20, 200, 0, 40), (9, 0, 3, 33, 0, 1)
ROUNDED = (
    Rounded(MANY, 72, 104, choices=1, activation="silu", bias=True),
    Rounded(FEW, 64, 90, choices=2, activation="quick_gelu", bias=False),
    Rounded(MANY, 1300, 70, choices=2, activation="silu", bias=False),  # columns in parts
    Rounded(FEW, 70, 1200, choices=1, activation="gelu_pytorch_tanh", bias=True),
)


@each_isa
@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: f"{case.size}x{case.inner}")
def test_with_rounded_inputs(case: Rounded, isa: str) -> None:
    """Experts of few rows, of many, and of an odd number of tiles, side by side."""
    run = jitted(case.activation)
    far = np.asarray(run(*case.arguments)) - case.expected
    assert np.linalg.norm(far) < 0.02 * np.linalg.norm(case.expected)
    for expert in np.flatnonzero(case.loads):
        own = (np.asarray(case.arguments[1]) == expert).any(axis=1)
        assert np.linalg.norm(far[own]) < 0.03 * np.linalg.norm(case.expected[own])


@pytest.mark.parametrize("kind", ["q4", "bfloat16"])
def test_one_expert_for_all_and_none_for_some(kind: str) -> None:
    make = maker(kind)
    x, weights = make.tokens(33), make.weights()
    chosen = jnp.full((33, 2), 4, jnp.int32)
    shares = jnp.where(jnp.arange(33)[:, None] % 3 == 0, 0, make.choice(33, 2)[1])
    found = cpu.experts(x, chosen, shares, weights, activation="silu")
    native = library()
    rounded = native is not None and native.best == "amx" and kind == "bfloat16"
    check(found, experts_reference(x, chosen, shares, weights, activation="silu"), rounded=rounded)
    np.testing.assert_array_equal(found[::3], 0)
    for rows in (0, 2):  # no rows; rows without any share
        none = cpu.experts(x[:rows], chosen[:rows], 0 * shares[:rows], weights, activation="silu")
        np.testing.assert_array_equal(none, jnp.zeros((rows, SIZE)))


def test_an_expert_that_does_not_exist_is_an_error() -> None:
    make = maker("q4")
    with pytest.raises(Exception, match="an expert that was chosen does not exist"):
        cpu.experts(
            make.tokens(1),
            jnp.array([[COUNT]]),
            jnp.ones((1, 1)),
            make.weights(),
            activation="silu",
        ).block_until_ready()


def test_what_the_library_takes_goes_to_it() -> None:
    make = maker("q4")
    weights, (chosen, shares) = make.weights(), make.choice(40, 2)
    x = jnp.zeros((40, SIZE))
    assert EXPERTS.pick("cpu", x, chosen, shares, weights, activation="silu").name == "C++"
    assert "activation is tanh" in EXPERTS.explain("cpu", x, chosen, shares, weights, activation="tanh")
    assert "activations are bf" in EXPERTS.explain(
        "cpu", x.astype("bfloat16"), chosen, shares, weights, activation="silu"
    )
    plain = maker("float8_e4m3fn").weights()
    assert "weights are float8_e4m3fn" in EXPERTS.explain("cpu", x, chosen, shares, plain, activation="silu")
    columns = jnp.tile(jnp.arange(SIZE), (COUNT, 1))
    gate = dataclasses.replace(weights.gate, weight=dataclasses.replace(weights.gate.weight, columns=columns))
    ordered = dataclasses.replace(weights, gate=gate)
    assert "an order of their own" in EXPERTS.explain("cpu", x, chosen, shares, ordered, activation="silu")
