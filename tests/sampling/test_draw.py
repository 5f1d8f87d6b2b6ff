"""C++ sampling against the noise of every token: the same tokens, whatever is filtered."""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.cpu import sampling as cpu
from llmjax.kernels.cpu.library import library
from llmjax.sampling.draw import DRAW, draw_by_scores
from tests.kernels.instruction_sets import INSTRUCTION_SETS

NATIVE = library()
pytestmark = pytest.mark.skipif(NATIVE is None, reason="the C++ kernels are not built")

FILTERS = {
    "none": (0.0, 0, 1.0),
    "top-p": (0.0, 0, 0.9),
    "small top-p": (0.0, 0, 0.05),
    "deep top-p": (0.0, 0, 0.99999),
    "top-k": (0.0, 5, 1.0),
    "deep top-k": (0.0, 700, 1.0),
    "too large top-k": (0.0, 5000, 1.0),
    "min-p": (0.03, 0, 1.0),
    "deep min-p": (1e-9, 0, 1.0),
    "all": (0.01, 50, 0.8),
    "all, deep": (1e-8, 900, 0.9999),
}


def sampled(isa: str, x: np.ndarray, *, temperature: float, filters: tuple[float, int, float]) -> list[list[int]]:
    """By the library and by scores."""
    arguments, expected = by_scores(x.tobytes(), len(x), temperature, filters)
    assert NATIVE is not None
    return [np.asarray(cpu.sample(*arguments, native=NATIVE, isa=isa)).tolist(), expected]


@lru_cache(maxsize=1)
def by_scores(
    content: bytes, rows: int, temperature: float, filters: tuple[float, int, float]
) -> tuple[tuple[jax.Array, ...], list[int]]:
    """Arguments, and what scores make of them; the same for all instruction sets."""
    min_p, top_k, top_p = filters
    keys = np.random.default_rng(7).integers(0, 1 << 32, (rows, 2), dtype=np.uint32)
    arguments = (
        jnp.asarray(np.frombuffer(content, np.float32).reshape(rows, -1)),
        jnp.asarray(keys),
        jnp.full(rows, temperature, jnp.float32),
        jnp.full(rows, min_p, jnp.float32),
        jnp.full(rows, top_k, jnp.int32),
        jnp.full(rows, top_p, jnp.float32),
    )
    return arguments, draw_by_scores(*arguments).tolist()


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("spread", [0.1, 3.0, 12.0])
def test_the_same_tokens(isa: str, name: str, spread: float) -> None:
    x = np.random.default_rng(3).standard_normal((200, 1009)).astype(np.float32) * np.float32(spread)
    found, expected = sampled(isa, x, temperature=0.8, filters=FILTERS[name])
    # Sums in another order may move a floor past a token, a last bit of the noise may change a near tie.
    assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 1


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", FILTERS)
def test_rows_that_are_not_ordinary(isa: str, name: str) -> None:
    x = np.full((8, 77), -np.inf, np.float32)
    x[1, 5] = np.nan
    x[2, 76] = 3.0
    x[3, [1, 70]] = np.inf
    x[4] = 2.0
    x[5] = 0.0
    x[5, 9] = np.nan
    x[6, :60] = np.linspace(-3e38, 3e38, 60)
    x[7, [0, 64]] = 1.0
    found, expected = sampled(isa, x, temperature=1.0, filters=FILTERS[name])
    assert found == expected
    assert found[0] == found[1] == found[5] == 0 and found[2] == 76 and found[3] in (1, 70) and found[6] == 59


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_temperature_zero_is_the_most_likely_token(isa: str) -> None:
    x = np.random.default_rng(0).standard_normal((9, 300)).astype(np.float32)
    found, expected = sampled(isa, x, temperature=0.0, filters=FILTERS["top-p"])
    assert found == expected == x.argmax(-1).tolist()


def test_shares_are_those_of_the_softmax() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
    rows = 20000
    x = np.tile(np.concatenate([logits, np.full(40, -50, np.float32)]), (rows, 1))
    found, _ = sampled(None, x, temperature=1.0, filters=FILTERS["none"])
    shares = np.bincount(found, minlength=44)[:4] / rows
    np.testing.assert_allclose(shares, [0.5, 0.25, 0.15, 0.1], atol=4 * (0.25 / rows) ** 0.5)


def test_a_cpu_with_the_library_uses_it() -> None:
    rows = [jnp.zeros(1) for _ in range(2)]
    arguments = (jnp.zeros((1, 9)), jnp.zeros((1, 2), jnp.uint32), *rows, jnp.zeros(1, jnp.int32), jnp.zeros(1))
    assert DRAW.pick("cpu", *arguments).name == "C++"
