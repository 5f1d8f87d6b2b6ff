"""The layer of an encoder in C++ with each instruction set, against NumPy in f64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from llmjax.kernels.blocks import Projection
from llmjax.kernels.cpu import encoder_layer as cpu
from llmjax.kernels.cpu.library import library
from llmjax.kernels.cpu.matrices import WITHOUT_PANELS
from llmjax.kernels.encoder_layer import EncoderLayerRules, EncoderLayerWeights
from llmjax.kernels.norm import Norm
from llmjax.kernels.qtensor import QTensor
from llmjax.weights.memory import HugePages
from llmjax.weights.panels import in_panels
from tests.kernels.instruction_sets import USABLE, each_isa

pytestmark = pytest.mark.skipif(library() is None, reason="the C++ library is not built")

Floats = NDArray[np.float64]
HEADS, HEAD_DIM, SIZE, INNER = 3, 24, 56, 104  # of which no vectors are a whole number of tiles
SEGMENTS = np.repeat(np.array([4, 0, -1, 7, -1], np.int32), [30, 17, 2, 1, 6])
USED = 50  # tokens until the last one of a segment
ACTIVATED = {
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))) / 2,
    "gelu_pytorch_tanh": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


@dataclass(frozen=True)
class Case:
    centered: bool = True
    bias: bool = True
    gated: bool = False
    activation: str = "gelu_pytorch_tanh"
    pairs: Literal["half", "quarter", "adjacent"] | None = None
    norm: Literal["heads", "whole"] | None = None


CASES = {
    "siglip": Case(),
    "clip": Case(activation="quick_gelu"),
    "exact": Case(activation="gelu", bias=False),
    "gated": Case(centered=False, gated=True, activation="silu", pairs="half"),
    "quarter": Case(pairs="quarter", norm="heads"),
    "adjacent": Case(centered=False, bias=False, gated=True, activation="gelu", pairs="adjacent", norm="whole"),
}


@dataclass(frozen=True)
class Given:
    """A layer's inputs as f64, of which the matrices are what bf16 holds."""

    x: Floats
    angles: Floats | None
    matrices: dict[str, Floats]
    vectors: dict[str, Floats]


def given(case: Case) -> Given:
    rng = np.random.default_rng(7)
    wide = HEADS * HEAD_DIM
    shapes = {"q": (wide, SIZE), "k": (wide, SIZE), "v": (wide, SIZE), "o": (SIZE, wide), "up": (INNER, SIZE)}
    shapes |= {"down": (SIZE, INNER)} | ({"gate": (INNER, SIZE)} if case.gated else {})
    matrices = {}
    for name, shape in shapes.items():
        drawn = rng.standard_normal(shape) / np.sqrt(shape[1])
        matrices[name] = np.asarray(jnp.asarray(drawn, jnp.bfloat16), np.float64)
    vectors = {name: 1 + 0.2 * rng.standard_normal(SIZE) for name in ("before", "second")}
    vectors |= {f"{name} bias": 0.2 * rng.standard_normal(SIZE) for name in ("before", "second") if case.centered}
    vectors |= {f"{name} bias": 0.2 * rng.standard_normal(shape[0]) for name, shape in shapes.items() if case.bias}
    if case.norm is not None:
        width = wide if case.norm == "whole" else HEAD_DIM
        vectors |= {name: 1 + 0.2 * rng.standard_normal(width) for name in ("q_norm", "k_norm")}
    x = 1 + rng.standard_normal((len(SEGMENTS), SIZE))
    angles = None if case.pairs is None else rng.uniform(0, 6, (len(SEGMENTS), HEAD_DIM // 2))
    single = {name: value.astype(np.float32).astype(np.float64) for name, value in vectors.items()}
    return Given(x.astype(np.float32).astype(np.float64), angles, matrices, single)


def normed(x: Floats, weight: Floats, bias: Floats | None = None, *, centered: bool = False) -> Floats:
    x = x - x.mean(-1, keepdims=True) if centered else x
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight
    return x if bias is None else x + bias


def turned(x: Floats, angles: Floats, pairs: str) -> Floats:
    """Each pair of entries as a complex number that is turned: [T, heads, head_dim]."""
    entries = np.arange(HEAD_DIM)
    first = {
        "half": entries[: HEAD_DIM // 2],
        "quarter": np.concatenate([entries[: HEAD_DIM // 4], entries[HEAD_DIM // 2 :][: HEAD_DIM // 4]]),
        "adjacent": entries[::2],
    }[pairs]
    second = first + {"half": HEAD_DIM // 2, "quarter": HEAD_DIM // 4, "adjacent": 1}[pairs]
    numbers = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)[:, None]
    out = np.empty_like(x)
    out[..., first], out[..., second] = numbers.real, numbers.imag
    return out


def expected(case: Case, of: Given) -> Floats:
    def product(name: str, x: Floats) -> Floats:
        return x @ of.matrices[name].T + of.vectors.get(f"{name} bias", 0.0)

    def norm(name: str, x: Floats) -> Floats:
        return normed(x, of.vectors[name], of.vectors.get(f"{name} bias"), centered=case.centered)

    n = norm("before", of.x)
    heads = (len(of.x), HEADS, HEAD_DIM)
    q, k, v = (product(name, n) for name in "qkv")
    if case.norm == "whole":
        q, k = normed(q, of.vectors["q_norm"]), normed(k, of.vectors["k_norm"])
    q, k, v = q.reshape(heads), k.reshape(heads), v.reshape(heads)
    if case.norm == "heads":
        q, k = normed(q, of.vectors["q_norm"]), normed(k, of.vectors["k_norm"])
    if of.angles is not None:
        assert case.pairs is not None
        q, k = turned(q, of.angles, case.pairs), turned(k, of.angles, case.pairs)
    scores = np.einsum("qhd,khd->hqk", q, k) * 0.2
    known = (SEGMENTS >= 0) & (SEGMENTS[:, None] == SEGMENTS)
    shares = np.where(known, np.exp(scores - scores.max()), 0)
    attended = np.einsum("hqk,khd->qhd", shares / np.maximum(shares.sum(-1, keepdims=True), 1e-30), v)
    y = of.x + product("o", attended.reshape(len(of.x), -1))
    m = norm("second", y)
    up = product("up", m)
    inner = ACTIVATED[case.activation](product("gate", m)) * up if case.gated else ACTIVATED[case.activation](up)
    return y + product("down", inner)


def computed(case: Case, of: Given, dtype: str, *, panels: bool = False) -> NDArray[np.float32]:
    def matrix(name: str) -> Projection | None:
        if name not in of.matrices:
            return None
        bias, weight = of.vectors.get(f"{name} bias"), jnp.asarray(of.matrices[name], dtype)
        kept: Any = in_panels(weight, HugePages()) if panels else weight
        return Projection(kept, None if bias is None else jnp.asarray(bias, jnp.float32))

    def norm(name: str, *, centered: bool = False) -> Norm | None:
        if name not in of.vectors:
            return None
        bias = of.vectors.get(f"{name} bias")
        shift = None if bias is None else jnp.asarray(bias, jnp.float32)
        return Norm(jnp.asarray(of.vectors[name], jnp.float32), 1e-5, centered=centered, bias=shift)

    parts: dict[str, Any] = {name: matrix(name) for name in ("q", "k", "v", "o", "gate", "up", "down")}
    parts |= {name: norm(name, centered=case.centered) for name in ("before", "second")}
    weights = EncoderLayerWeights(**parts, q_norm=norm("q_norm"), k_norm=norm("k_norm"))
    rules = EncoderLayerRules(
        heads=HEADS,
        scale=0.2,
        activation=case.activation,
        whole=case.norm == "whole",
        pairs=case.pairs or "half",
        dtype=jnp.dtype(dtype),
    )
    x = jnp.asarray(of.x, jnp.float32)
    turns = None if of.angles is None else (jnp.cos(jnp.asarray(of.angles)), jnp.sin(jnp.asarray(of.angles)))
    return np.asarray(cpu.encoder_layer(x, weights, turns, jnp.asarray(SEGMENTS), rules))


@each_isa
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_a_layer(name: str, dtype: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "usable_cores", lambda: 1)
    monkeypatch.setattr(cpu, "ROWS_OF_CORE", 20)  # the MLP takes three blocks
    of = given(CASES[name])
    out, wanted = computed(CASES[name], of, dtype), expected(CASES[name], of)
    known = SEGMENTS >= 0
    np.testing.assert_allclose(out[known], wanted[known], atol=2e-5 if dtype == "float32" else 6e-2)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(out[USED:], 0)


@pytest.mark.parametrize("isa", [isa for isa in USABLE if isa not in WITHOUT_PANELS], indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_matrices_in_panels(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "usable_cores", lambda: 1)
    monkeypatch.setattr(cpu, "ROWS_OF_CORE", 20)
    of = given(CASES[name])
    out, wanted = computed(CASES[name], of, "bfloat16", panels=True), expected(CASES[name], of)
    known = SEGMENTS >= 0
    np.testing.assert_allclose(out[known], wanted[known], atol=6e-2)
    np.testing.assert_array_equal(out[USED:], 0)
    np.testing.assert_allclose(out, computed(CASES[name], of, "bfloat16"), atol=4e-2)
    moved = replace(of, x=np.concatenate([of.x[:30], of.x[:26] * 0.5]))
    np.testing.assert_array_equal(out[:30], computed(CASES[name], moved, "bfloat16", panels=True)[:30])


def test_no_segment_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.kernels.test_encoder_layer.SEGMENTS", np.full(len(SEGMENTS), -1, np.int32))
    np.testing.assert_array_equal(computed(CASES["siglip"], given(CASES["siglip"]), "float32"), 0)


def test_a_picture_is_what_it_is_alone() -> None:
    """Rows do not depend on others of the call, to the bit, in the type in which most are computed."""
    case, of = CASES["gated"], given(CASES["gated"])
    together = computed(case, of, "float32")
    moved = replace(of, x=np.concatenate([of.x[:30], of.x[:26] * 0.5]))
    np.testing.assert_array_equal(together[:30], computed(case, moved, "float32")[:30])


def test_what_the_library_refuses() -> None:
    x = jax.ShapeDtypeStruct((64, SIZE), jnp.float32)
    wide = HEADS * HEAD_DIM
    rules = EncoderLayerRules(
        heads=HEADS, scale=1.0, activation="gelu", whole=False, pairs="half", dtype=jnp.dtype(jnp.float32)
    )

    def of(*shape: int) -> Any:
        return Projection(jnp.zeros(shape, jnp.float32))

    norm = Norm(jnp.ones(SIZE), 1e-5)
    attention = {"q": of(wide, SIZE), "k": of(wide, SIZE), "v": of(wide, SIZE), "o": of(SIZE, wide)}
    weights = EncoderLayerWeights(
        before=norm, second=norm, gate=None, up=of(INNER, SIZE), down=of(SIZE, INNER), **attention
    )
    assert cpu.refuses(x, weights, rules) is None
    assert cpu.refuses(x, weights, replace(rules, activation="tanh")) == "the activation is tanh"
    half = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    assert cpu.refuses(half, weights, rules) == "activations are bfloat16"
    odd = replace(weights, down=of(SIZE, 3))
    assert cpu.refuses(x, odd, rules) == "3 inputs are not a multiple of 8"
    assert not isinstance(weights.q.weight, QTensor)
