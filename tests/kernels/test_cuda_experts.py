"""Products of experts for CUDA, run as XLA operations, against every token through every expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.kernels.blocks import ExpertWeights, Projection
from llmjax.kernels.cuda.experts import experts, plans_of, refuses, rows_of
from llmjax.kernels.experts import EXPERTS
from llmjax.kernels.experts_reference import experts_reference
from llmjax.kernels.qtensor import CUDA_TILE, QTensor
from llmjax.kernels.row_format import Codes, RowFormat

SIZE, INNER = 96, 72
PRODUCTS = ("experts in", "experts out", "fragments in", "fragments out")
FORMATS = {
    "q4_1": lambda size_in: RowFormat(size_in, Codes(4), 32, "f16", minimum="f16"),
    "q8_0": lambda size_in: RowFormat(size_in, Codes(8, "int"), 32, "f16"),
    "mxfp4": lambda size_in: RowFormat(size_in, Codes(4, levels=tuple(i - 7.5 for i in range(16))), 32, "e8m0"),
}
HALVES = {"f16": np.float16, "f32": np.float32}


@dataclass(frozen=True)
class Case:
    tokens: int
    choices: int = 2
    num_experts: int = 5
    kind: str = "float32"  # a dtype, or one of FORMATS
    down: str | None = None  # another kind
    x: str = "float32"
    activation: str = "silu"
    bias: bool = False
    rows: int | None = None
    splits: int | None = None
    unshared: float = 0.2  # of the choices
    size: int = SIZE
    inner: int = INNER


def random_words(rng: np.random.Generator, form: RowFormat, stack: tuple[int, ...]) -> np.ndarray:
    """Records of random codes with scales of about 1/32."""
    words = rng.integers(0, 1 << 32, (*stack, form.num_words, CUDA_TILE), np.uint64).astype(np.uint32)
    for entry in form.fields.values():
        shape = (*stack, entry.num_words, CUDA_TILE)
        if entry.number in HALVES:
            kind = HALVES[entry.number]
            raw = rng.uniform(0.01, 0.05, (*shape, 4 // np.dtype(kind).itemsize)).astype(kind).view(np.uint32)
        else:
            low, high = {"e8m0": (118, 124)}.get(entry.number, (-4, 5))
            raw = rng.integers(low, high, (*shape, 4)).astype(np.int8).view(np.uint32)
        words[..., entry.start : entry.start + entry.num_words, :] = raw[..., 0]
    return words


def arguments(case: Case, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array, ExpertWeights]:
    rng = np.random.default_rng(seed)

    def floats(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def stack(size_out: int, size_in: int, kind: str) -> Projection:
        bias = floats(case.num_experts, size_out) if case.bias else None
        if kind not in FORMATS:
            return Projection((floats(case.num_experts, size_out, size_in) * size_in**-0.5).astype(kind), bias)
        form = FORMATS[kind](size_in)
        words = random_words(rng, form, (case.num_experts, -(-size_out // CUDA_TILE)))
        return Projection(QTensor(jnp.asarray(words), None, form, size_out, jnp.dtype(case.x)), bias)

    weights = ExpertWeights(
        gate=stack(case.inner, case.size, case.kind),
        up=stack(case.inner, case.size, case.kind),
        down=stack(case.size, case.inner, case.down or case.kind),
    )
    chosen = np.stack([rng.permutation(case.num_experts)[: case.choices] for _ in range(case.tokens)])
    shares = rng.random(chosen.shape) * (rng.random(chosen.shape) >= case.unshared)
    x = floats(case.tokens, case.size).astype(case.x)
    return x, jnp.asarray(chosen, jnp.int32), jnp.asarray(shares, jnp.float32), weights


def error(case: Case, seed: int = 0, *, interpret: bool = True) -> float:
    """Error of the kernels, relative to the norm of the reference."""
    given = arguments(case, seed)
    assert refuses(*given, activation=case.activation) is None

    def call(x: jax.Array, chosen: jax.Array, shares: jax.Array, weights: ExpertWeights) -> jax.Array:
        choices = {} if case.splits is None else {name: {"splits": case.splits} for name in PRODUCTS}
        options: dict[str, Any] = {"rows": case.rows, "choices": choices, "interpret": interpret}
        return experts(x, chosen, shares, weights, activation=case.activation, **options)

    hurry = {"xla_backend_optimization_level": "0"} if interpret else None
    out = jax.jit(call).lower(*given).compile(hurry)(*given)
    assert out.dtype == given[0].dtype
    assert out.shape == given[0].shape
    expected = np.asarray(experts_reference(*given, activation=case.activation), np.float64)
    return float(np.linalg.norm(np.asarray(out, np.float64) - expected) / max(np.linalg.norm(expected), 1e-9))


CASES = {
    "one token": Case(1, choices=3, bias=True),
    "two tokens, columns shared": Case(2, splits=2, bias=True),
    "one token, bf16": Case(1, kind="bfloat16", x="bfloat16", activation="gelu_pytorch_tanh"),
    "nothing shared": Case(3, unshared=1.0),
    "sorted": Case(40, choices=3, bias=True),
    "sorted, columns shared": Case(40, splits=2, bias=True),
    "sorted, f16": Case(70, kind="float16", x="float16", num_experts=2, unshared=0),
    "more experts than choices": Case(3, num_experts=40),
    "one expert": Case(20, choices=1, num_experts=1, unshared=0),
    "q4_1, one token": Case(1, choices=4, kind="q4_1", bias=True),
    "q4_1": Case(9, kind="q4_1", bias=True),
    "q4_1, bf16, columns shared": Case(9, kind="q4_1", x="bfloat16", splits=2),
    "q8_0, bf16": Case(9, choices=3, kind="q8_0", x="bfloat16", activation="gelu", bias=True),
    "q8_0 and f32, quick gelu": Case(5, kind="q8_0", down="float32", activation="quick_gelu"),
    "mxfp4": Case(5, kind="mxfp4", activation="gelu"),
}


ON_A_CARD_ONLY = {name for name in CASES if name.startswith(("sorted, ", "one expert", "q4_1"))}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in ON_A_CARD_ONLY])
def test_equals_the_reference(name: str) -> None:
    case = CASES[name]
    assert error(case) < (2e-6 if case.x == "float32" else 1e-2)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_experts = draw(st.integers(1, 9))
    return Case(
        tokens=draw(st.integers(1, 50)),
        choices=draw(st.integers(1, num_experts)),
        num_experts=num_experts,
        rows=draw(st.sampled_from([None, 1, 16, 32])),
        splits=draw(st.sampled_from([None, 1, 2])),
        bias=draw(st.booleans()),
        unshared=draw(st.sampled_from([0.0, 0.5, 0.95])),
        size=draw(st.sampled_from([33, 64])),
        inner=draw(st.sampled_from([40, 160])),
    )


@pytest.mark.slow
@settings(max_examples=2, deadline=None, derandomize=True)
@given(case=cases(), seed=st.integers(0, 99))
def test_equals_the_reference_anywhere(case: Case, seed: int) -> None:
    assert error(case, seed) < 2e-6


def stacks(kind: str, x: str = "bfloat16") -> ExpertWeights:
    """Shapes of 128 experts."""
    case = Case(1, num_experts=128, kind=kind, x=x)
    return jax.eval_shape(lambda: arguments(case)[3]) if kind not in FORMATS else arguments(case)[3]


def test_programs_take_about_what_an_expert_has() -> None:
    floats, codes = stacks("bfloat16"), stacks("q4_1")
    assert rows_of(1, 8, floats) == 1
    assert rows_of(16, 128, floats) == 16
    assert rows_of(16, 128, codes) == 8
    for weights in (floats, codes):
        assert rows_of(512, 4096, weights) == 32
        assert rows_of(4096, 32768, weights) == 64


def test_codes_become_fragments_where_all_three_stacks_can() -> None:
    for kind, x, kernels in (
        ("q4_1", "bfloat16", {"fragments in", "fragments out"}),
        ("q4_1", "float16", {"experts in", "experts out"}),
        ("mxfp4", "bfloat16", {"experts in", "experts out"}),
    ):
        weights = stacks(kind, x)
        assert {key.kernel for key in plans_of(16, 128, weights)} == kernels
        assert {key.kernel for key in plans_of(1, 8, weights)} == {"experts in", "experts out"}


@pytest.mark.slow
def test_fragments_of_experts_round_activations_alone() -> None:
    """Half of the choices without a share, blocks of 8 rows, columns divided among programs and warps."""
    case = Case(21, choices=3, kind="q4_1", x="bfloat16", rows=8, splits=2, bias=True, unshared=0.5, size=160)
    assert error(case) < 4e-3


def test_says_what_it_refuses() -> None:
    x, chosen, shares, weights = arguments(Case(2, kind="q4_1"))
    other = arguments(Case(2, kind="float32"))[3]
    mixed = ExpertWeights(gate=weights.gate, up=other.up, down=other.down)
    assert refuses(x, chosen, shares, mixed, activation="silu") == "gate and up are stored differently"
    assert EXPERTS.pick("gpu", x, chosen, shares, weights, activation="silu").name == "Pallas"
    assert EXPERTS.pick("cpu", x, chosen, shares, weights, activation="silu").name != "Pallas"
    assert "int32" in str(refuses(x.astype(jnp.int32), chosen, shares, weights, activation="silu"))
    assert refuses(x[:0], chosen[:0], shares[:0], weights, activation="silu") == "no choices"


ON_A_CARD = {
    **CASES,
    "Qwen3-30B's, one token": Case(1, 8, 128, "bfloat16", x="bfloat16", size=2048, inner=768, unshared=0),
    "Qwen3-30B's, 300 tokens": Case(300, 8, 128, "bfloat16", x="bfloat16", size=2048, inner=768, unshared=0),
    "q4_1, 300 tokens": Case(300, 8, 32, "q4_1", x="bfloat16", size=2048, inner=768, unshared=0),
}


@pytest.mark.cuda
@pytest.mark.parametrize("name", ON_A_CARD)
def test_equals_the_reference_on_a_card(name: str, cuda_device: jax.Device) -> None:
    case = ON_A_CARD[name]
    assert error(case, interpret=False) < (1e-4 if case.x == "float32" else 1e-2)
