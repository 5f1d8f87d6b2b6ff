"""Attention of segments: XLA's and the C++ kernel with each instruction set, against NumPy in f64."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from llmjax.kernels.attention.segments import SEGMENTS, attend_by_xla, attend_segments
from llmjax.kernels.cpu import segments as cpu
from llmjax.kernels.cpu.library import library
from llmjax.kernels.registry import traced_for
from tests.kernels.instruction_sets import each_isa

TILES = np.repeat(np.arange(3, dtype=np.int32), 24)
MIXED = np.repeat(np.array([0, 1, 5, 2, -1], np.int32), [4, 61, 300, 1, 7])  # ids in any order, then padding
FILLED = np.tile(np.where(np.arange(24) % 6 < 5, 0, -1), 3).astype(np.int32) + 9 * (np.arange(72) % 24 % 6 < 5) * (
    np.arange(72, dtype=np.int32) // 24
)  # the last column of each tile is of no picture
# Rows and columns at the ends of tiles see the others and are not seen; a tile has none that is seen.
UNSEEN = np.where(np.arange(24) % 6 < 5, 1, 0) * np.where(np.arange(24) < 18, 1, 0)
UNSEEN = np.concatenate([np.where(UNSEEN, tile, -2 - tile) for tile in range(2)] + [np.full(24, -4)]).astype(np.int32)
CASES: dict[str, tuple[NDArray[np.int32], int, int, dict[str, int]]] = {  # segments, heads, head size, options
    "tiles": (TILES, 3, 16, {"tile": 24, "reach": 23}),
    "one": (np.zeros(13, np.int32), 7, 20, {}),
    "mixed": (MIXED, 2, 72, {"reach": 299}),
    "filled": (FILLED.astype(np.int32), 2, 40, {"tile": 24}),
    "unseen": (UNSEEN, 3, 24, {"tile": 24}),
    "unseen in a row": (UNSEEN, 3, 24, {"reach": 23}),
    "padding": (np.full(5, -1, np.int32), 2, 8, {}),
}
needs_library = pytest.mark.skipif(library() is None, reason="the C++ library is not built")


def inputs(name: str) -> tuple[NDArray[Any], ...]:
    segments, heads, size, _ = CASES[name]
    rng = np.random.default_rng(len(segments))
    return tuple(rng.standard_normal((3, len(segments), heads, size)).astype(np.float32))


def known(name: str) -> NDArray[np.bool_]:
    """Which tokens see any."""
    segments = CASES[name][0]
    return np.isin(np.where(segments < -1, -2 - segments, segments), segments[segments >= 0])


def expected(name: str, scale: float) -> NDArray[np.float64]:
    segments = CASES[name][0]
    q, k, v = (each.astype(np.float64) for each in inputs(name))
    sees = np.where(segments < -1, -2 - segments, segments)
    scores = np.where(sees[:, None] == segments, np.einsum("qhd,khd->hqk", q, k) * scale, -1e300)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out: NDArray[np.float64] = np.einsum("hqk,khd->qhd", shares / shares.sum(axis=-1, keepdims=True), v)
    return out


@pytest.mark.parametrize("block", [20, 512])
@pytest.mark.parametrize("name", CASES)
def test_by_xla(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmjax.kernels.attention.segments.BLOCK", block)
    segments, _, _, options = CASES[name]
    run = jax.jit(partial(attend_by_xla, scale=0.3, dtype=jnp.dtype(jnp.float32), **options))
    out = run(*map(jnp.asarray, inputs(name)), jnp.asarray(segments))
    np.testing.assert_allclose(np.asarray(out)[known(name)], expected(name, 0.3)[known(name)], atol=5e-6)
    assert np.isfinite(np.asarray(out)).all()


@needs_library
@each_isa
@pytest.mark.parametrize("activations", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_by_the_library(name: str, dtype: str, activations: str, isa: str) -> None:
    segments = CASES[name][0]
    given = [jnp.asarray(each, activations) for each in inputs(name)]
    out = cpu.attend(*given, jnp.asarray(segments), scale=0.3, dtype=jnp.dtype(dtype))
    assert out.dtype == activations and out.shape == given[0].shape
    values = np.asarray(out, np.float32)
    exact = dtype == activations == "float32"
    np.testing.assert_allclose(values[known(name)], expected(name, 0.3)[known(name)], atol=5e-6 if exact else 4e-2)
    assert np.isfinite(values).all()


@needs_library
def test_a_segment_is_what_it_is_alone() -> None:
    segments = CASES["mixed"][0]
    q, k, v = inputs("mixed")
    run = partial(cpu.attend, scale=0.3, dtype=jnp.dtype(jnp.bfloat16))
    together = np.asarray(run(*map(jnp.asarray, (q, k, v)), jnp.asarray(segments)))
    for id_ in (0, 1, 5, 2):
        own = segments == id_
        alone = run(*(jnp.asarray(each[own]) for each in (q, k, v)), jnp.zeros(own.sum(), jnp.int32))
        np.testing.assert_array_equal(together[own], alone)


@needs_library
def test_wrong_shapes_are_errors() -> None:
    q = jnp.zeros((5, 2, 16))
    with pytest.raises(Exception, match="segments: shapes do not fit each other"):
        jax.block_until_ready(cpu.attend(q, q, q, jnp.zeros(4, jnp.int32), scale=1.0, dtype=jnp.dtype(jnp.float32)))


@needs_library
def test_on_a_cpu_the_library_is_picked() -> None:
    q = jax.ShapeDtypeStruct((5, 2, 16), jnp.float32)
    pick = partial(SEGMENTS.explain, "cpu", q, q, q, jax.ShapeDtypeStruct((5,), jnp.int32), scale=1.0)
    assert pick(dtype=jnp.dtype(jnp.float32)) == "C++"
    assert pick(dtype=jnp.dtype(jnp.float16)) == "XLA (C++: products are of float16)"


def test_queries_are_rounded_where_a_type_is_given() -> None:
    q, k, v = (jnp.asarray(each) for each in inputs("tiles"))
    segments = jnp.asarray(TILES)
    with traced_for("cuda"):  # no kernel of ours
        near = attend_segments(q, k, v, segments, scale=0.3, dtype=jnp.dtype(jnp.bfloat16), tile=24)
        exact = attend_segments(q, k, v, segments, scale=0.3, tile=24)
    assert near.dtype == jnp.float32
    assert 0 < float(jnp.abs(near - exact).max()) < 2e-2
