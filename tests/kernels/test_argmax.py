"""The largest entry of rows, in every way it is found."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.argmax import argmax, argmax_by_reductions
from llmjax.kernels.cpu import sampling as cpu
from llmjax.kernels.cpu.library import forced_isa
from tests.kernels.instruction_sets import USABLE

WAYS = ["operation", "reductions", *USABLE]


def find(way: str, x: np.ndarray) -> list[int]:
    if way == "operation":
        return np.asarray(argmax(jnp.asarray(x))).tolist()
    if way == "reductions":
        return np.asarray(argmax_by_reductions(jnp.asarray(x))).tolist()
    with forced_isa(way):
        return np.asarray(cpu.argmax(jnp.asarray(x))).tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 1000])
def test_random_rows_and_equal_entries(way: str, size: int) -> None:
    rng = np.random.default_rng(size)
    x = np.concatenate([rng.standard_normal((20, size)), rng.integers(0, 3, (20, size))]).astype(np.float32)
    assert find(way, x) == x.argmax(-1).tolist()


@pytest.mark.parametrize("way", WAYS)
def test_infinities_and_nan(way: str) -> None:
    x = np.zeros((6, 130), np.float32)
    x[0], x[1], x[2] = -np.inf, np.nan, -np.inf
    x[2, 77] = -3e38
    x[3, 129] = np.inf
    x[4, 70], x[4, 3] = np.nan, 5
    x[5, 128] = np.nan
    assert find(way, x) == [0, 0, 77, 129, 0, 0]
