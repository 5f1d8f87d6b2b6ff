"""The largest entries by blocks, as an accelerator finds them, against a stable sort."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.sampling.top import top_by_blocks, top_entries


def expected(x: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(-x, axis=-1, kind="stable")[:, :count]
    return np.take_along_axis(x, order, axis=-1), order


@given(
    size=st.integers(1, 1000),
    count=st.integers(0, 20),
    levels=st.sampled_from([1, 2, 10, 10**6]),
    share_forbidden=st.sampled_from([0, 0.5, 1]),
    seed=st.integers(0, 2**31),
)
def test_as_a_stable_sort(size: int, count: int, levels: int, share_forbidden: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = min(count, size)
    x = rng.integers(0, levels, (2, size)).astype(np.float32)  # few levels: many ties
    x[rng.random(x.shape) < share_forbidden] = -np.inf
    values, ids = top_by_blocks(jnp.asarray(x), count)
    wanted_values, wanted_ids = expected(x, count)
    assert np.array_equal(values, wanted_values)
    assert ids.dtype == jnp.int32
    assert np.array_equal(ids, wanted_ids)


@pytest.mark.parametrize("size", [96, 49152])
def test_both_ways_agree(size: int) -> None:
    x = jax.random.normal(jax.random.key(0), (3, size))
    for one, other in zip(top_entries(x, 20), top_by_blocks(x, 20), strict=True):
        assert np.array_equal(one, other)


def test_only_blocks_are_sorted_on_other_devices() -> None:
    text = jax.jit(lambda x: top_entries(x, 20)).trace(jax.ShapeDtypeStruct((4, 128256), jnp.float32))
    lowered = text.lower(lowering_platforms=("cuda",)).as_text()
    tops = [line for line in lowered.splitlines() if "chlo.top_k" in line]
    assert [line.split("tensor<")[1].split(">")[0] for line in tops] == ["4x1002xf32", "4x2560xf32"]
