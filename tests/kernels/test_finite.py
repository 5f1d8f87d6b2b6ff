"""Which rows are numbers throughout, in every way it is found."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.cpu import sampling as cpu
from llmjax.kernels.cpu.library import forced_isa
from llmjax.kernels.finite import finite_by_reduction, finite_rows
from tests.kernels.instruction_sets import USABLE

WAYS = ["operation", "reduction", *USABLE]


def find(way: str, x: np.ndarray) -> list[bool]:
    if way == "operation":
        return np.asarray(finite_rows(jnp.asarray(x))).tolist()
    if way == "reduction":
        return np.asarray(finite_by_reduction(jnp.asarray(x))).tolist()
    with forced_isa(way):
        return np.asarray(cpu.finite_rows(jnp.asarray(x))).tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 7, 64, 65, 131])
def test_one_entry_anywhere_is_found(way: str, size: int) -> None:
    values = np.array([np.nan, np.inf, -np.inf, np.finfo(np.float32).max, np.finfo(np.float32).tiny / 2], np.float32)
    x = np.random.default_rng(size).standard_normal((size * len(values), size)).astype(np.float32)
    for row in range(len(x)):
        x[row, row % size] = values[row // size]
    assert find(way, x) == [row // size >= 3 for row in range(len(x))]


@pytest.mark.parametrize("way", WAYS)
def test_no_rows(way: str) -> None:
    assert find(way, np.zeros((0, 5), np.float32)) == []
