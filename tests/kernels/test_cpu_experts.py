"""Experts in C++ against the specification: instruction sets, plain and quantised stacks, all kinds of choices."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.blocks import Projection
from kernels.cpu import experts as cpu
from kernels.cpu.library import Library, library
from kernels.experts import EXPERTS, ExpertWeights
from kernels.experts_reference import experts_reference
from kernels.qtensor import Codes, QTensor, RowFormat

NATIVE = library()
ISAS = NATIVE.usable if NATIVE else ()
pytestmark = pytest.mark.skipif(NATIVE is None, reason="the C++ kernels are not built")

SIZE, INNER, COUNT = 72, 104, 6  # neither a multiple of the widest vectors


def native() -> Library:
    assert NATIVE is not None
    return NATIVE


class Maker:
    """Random stacks of one kind: a dtype or ``q4``."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.rng = np.random.default_rng(0)

    def floats(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.rng.standard_normal(shape), jnp.float32)

    def stack(self, size_out: int, size_in: int, *, bias: bool) -> Projection:
        added = self.floats(COUNT, size_out) if bias else None
        if self.kind != "q4":
            return Projection((self.floats(COUNT, size_out, size_in) * size_in**-0.5).astype(self.kind), added)
        form = RowFormat(size_in, Codes(4), 32, "f32", minimum="f32")
        words = self.rng.integers(0, 1 << 32, (COUNT, -(-size_out // 16), form.num_words, 16), dtype=np.uint32)
        for entry, most in ((form.fields["scales"], 0.2), (form.fields["minima"], 1.5)):
            values = self.rng.random((*words.shape[:2], entry.num_words, 16), np.float32) * most * size_in**-0.5
            words[:, :, entry.start : entry.start + entry.num_words] = values.view(np.uint32)
        return Projection(QTensor(jnp.asarray(words), None, form, size_out, jnp.dtype(jnp.float32)), added)

    def weights(self, *, bias: bool = False) -> ExpertWeights:
        gate, up = (self.stack(INNER, SIZE, bias=bias) for _ in range(2))
        return ExpertWeights(gate, up, self.stack(SIZE, INNER, bias=bias))

    def choice(self, rows: int, choices: int) -> tuple[jax.Array, jax.Array]:
        chosen = np.stack([self.rng.permutation(COUNT)[:choices] for _ in range(rows)])
        return jnp.asarray(chosen.astype(np.int32)), jnp.asarray(self.rng.random((rows, choices), np.float32))


def check(found: jax.Array, expected: jax.Array) -> None:
    """Where tiles multiply plain matrices, an element of x keeps 16 bits."""
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=2e-4, atol=4e-3)


@pytest.mark.parametrize("isa", ISAS)
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
    make = Maker(kind)
    x, weights, (chosen, shares) = make.floats(rows, SIZE), make.weights(bias=bias), make.choice(rows, choices)
    run = jax.jit(partial(cpu.experts, activation=activation, native=native(), isa=isa))
    check(run(x, chosen, shares, weights), experts_reference(x, chosen, shares, weights, activation=activation))


@pytest.mark.parametrize("kind", ["q4", "bfloat16"])
def test_one_expert_for_all_and_none_for_some(kind: str) -> None:
    make = Maker(kind)
    x, weights = make.floats(33, SIZE), make.weights()
    chosen = jnp.full((33, 2), 4, jnp.int32)
    shares = jnp.where(jnp.arange(33)[:, None] % 3 == 0, 0, make.choice(33, 2)[1])
    found = cpu.experts(x, chosen, shares, weights, activation="silu", native=native())
    check(found, experts_reference(x, chosen, shares, weights, activation="silu"))
    np.testing.assert_array_equal(found[::3], 0)
    for rows in (0, 2):  # no rows; rows without any share
        none = cpu.experts(x[:rows], chosen[:rows], 0 * shares[:rows], weights, activation="silu", native=native())
        np.testing.assert_array_equal(none, jnp.zeros((rows, SIZE)))


def test_an_expert_that_does_not_exist_is_an_error() -> None:
    make = Maker("q4")
    with pytest.raises(Exception, match="an expert that was chosen does not exist"):
        cpu.experts(
            make.floats(1, SIZE),
            jnp.array([[COUNT]]),
            jnp.ones((1, 1)),
            make.weights(),
            activation="silu",
            native=native(),
        ).block_until_ready()


def test_what_the_library_takes_goes_to_it() -> None:
    make = Maker("q4")
    weights, (chosen, shares) = make.weights(), make.choice(40, 2)
    x = jnp.zeros((40, SIZE))
    assert EXPERTS.pick("cpu", x, chosen, shares, weights, activation="silu").name == "C++"
    assert "activation is gelu" in EXPERTS.explain("cpu", x, chosen, shares, weights, activation="gelu")
    assert "activations are bf" in EXPERTS.explain(
        "cpu", x.astype("bfloat16"), chosen, shares, weights, activation="silu"
    )
    plain = Maker("float32").weights()
    assert "weights are float32" in EXPERTS.explain("cpu", x, chosen, shares, plain, activation="silu")
    columns = jnp.tile(jnp.arange(SIZE), (COUNT, 1))
    gate = dataclasses.replace(weights.gate, weight=dataclasses.replace(weights.gate.weight, columns=columns))
    ordered = dataclasses.replace(weights, gate=gate)
    assert "an order of their own" in EXPERTS.explain("cpu", x, chosen, shares, ordered, activation="silu")
