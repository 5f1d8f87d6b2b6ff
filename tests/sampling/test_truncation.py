"""Floors of min-p, top-k and top-p: the way over the shortlist, the deep search, and sorted NumPy agree."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.sampling import truncation

R, V = 5, 300  # more than the shortlist

shortlist = jax.jit(truncation._floor_by_shortlist)
search = jax.jit(partial(truncation._floor_by_search, digit=truncation.DIGIT))


def reference(z: np.ndarray, min_p: float, top_k: int, top_p: float) -> float:
    """The smallest kept entry of a row, in float64."""
    z = np.sort(z.astype(np.float64))[::-1]
    z = z[z >= np.log(min_p)] if min_p else z
    if top_k and len(z) > top_k:
        z = z[z >= z[top_k - 1]]
    if top_p < 1:
        mass = np.cumsum(np.exp(z))
        z = z[: 1 + np.searchsorted(mass, top_p * mass[-1])]
    return z[-1]


def row(rng: np.random.Generator, scale: float, grid: bool) -> np.ndarray:
    z = rng.normal(size=V).astype(np.float32) * np.float32(scale)
    z = np.round(z * 4) / 4 if grid else z
    return z - z.max()


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.lists(st.sampled_from([0.01, 0.5, 2.0, 50.0]), min_size=R, max_size=R),
    grid=st.booleans(),
    min_p=st.lists(st.sampled_from([0, 0, 0.02, 0.5, 1]), min_size=R, max_size=R),
    top_k=st.lists(st.sampled_from([0, 0, 1, 7, 127, 128, 129, 200, 299]), min_size=R, max_size=R),
    top_p=st.lists(st.sampled_from([1, 1, 1e-20, 0.3, 0.9, 0.99999]), min_size=R, max_size=R),
)
def test_floors_agree(
    seed: int, scale: list[float], grid: bool, min_p: list[float], top_k: list[int], top_p: list[float]
) -> None:
    rng = np.random.default_rng(seed)
    z = np.stack([row(rng, s, grid) for s in scale])
    args = jnp.asarray(z), jnp.float32(min_p), jnp.int32(top_k), jnp.float32(top_p)
    for floors in (np.asarray(shortlist(*args)), np.asarray(search(*args))):
        for i in range(R):
            p = float(np.float32(top_p[i]))
            # float32 sums may fall on either side of a target that they meet.
            low, high = (reference(z[i], min_p[i], top_k[i], p * t if p < 1 else p) for t in (1 + 3e-6, 1 - 3e-6))
            kept = z[i][z[i] >= floors[i]].min()
            assert low <= kept <= high


def test_top_k_and_min_p_are_exact() -> None:
    z = np.stack([row(np.random.default_rng(i), 3, False) for i in range(R)])
    for k in (1, 50, 128, 129, 250):
        args = jnp.asarray(z), jnp.zeros(R), jnp.full(R, k), jnp.ones(R)
        kth = np.sort(z, axis=-1)[:, -k]
        assert np.array_equal(shortlist(*args), kth) and np.array_equal(search(*args), kth)


def test_top_p_takes_the_smallest_set_that_reaches_the_mass() -> None:
    p = np.array([0.5, 0.25, 0.125, 0.125], np.float32)  # sums of these are exact
    z = jnp.asarray(np.log(p) - np.log(p[0]))[None]
    for top_p, kept in ((0.4, 1), (0.51, 2), (0.74, 2), (0.76, 4), (0.99, 4)):  # the two last ones tie
        for floor in (shortlist, search):
            found = floor(z, jnp.zeros(1), jnp.zeros(1, jnp.int32), jnp.float32([top_p]))
            assert int((z >= found[:, None]).sum()) == kept


@pytest.mark.parametrize("fill", [-np.inf, np.nan])
def test_rows_without_values_do_not_disturb_others(fill: float) -> None:
    z = np.stack([row(np.random.default_rng(3), 3, False), np.full(V, fill, np.float32)])
    args = jnp.asarray(z), jnp.float32([0.1, 0.1]), jnp.int32([200, 200]), jnp.float32([0.9, 0.9])
    assert np.isclose(shortlist(*args)[0], reference(z[0], 0.1, 200, 0.9))
