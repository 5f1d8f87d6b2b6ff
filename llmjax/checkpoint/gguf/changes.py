"""Undoes what a converter does to tensors beside renaming them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Change:
    """How the original tensor is made from the stored one, in the order of the attributes.

    Attributes:
        values: makes the original's values, element by element, in f32. Raises ValueError.
        rows: int [n]; row i (of a vector: element i) is stored row ``rows[i]``. None: all in order.
        columns: int [n]; column i is stored column ``columns[i]``. None: all in order.
        shape: shape of the original if the file has another; None: it is the same.
    """

    values: Callable[[np.ndarray], np.ndarray] | None = None
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    shape: tuple[int, ...] | None = None


UNCHANGED = Change()


def halves_apart(rows: int, heads: int) -> np.ndarray:
    """The stored rows of heads with interleaved halves: row (head, half, i) is stored row (head, i, half).

    Raises:
        ValueError: heads cannot have halves of ``rows``.
    """
    if rows % (2 * heads):
        raise ValueError(f"has {rows} rows, not an even number for {heads} heads")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(rows)


def axes_in_turn(rows: int, heads: int) -> np.ndarray:
    """The stored rows of heads with pairs of one axis before those of the other, which turn by turn were.

    Row (head, i, axis, of pair) is stored row (head, axis, i, of pair).

    Raises:
        ValueError: heads of ``rows`` cannot have as many pairs of both.
    """
    if rows % (4 * heads):
        raise ValueError(f"has {rows} rows, not {heads} heads of pairs of two axes")
    return np.arange(rows).reshape(heads, 2, -1, 2).swapaxes(1, 2).reshape(rows)


def minus(offset: float) -> Callable[[np.ndarray], np.ndarray]:
    """Subtracts the number that the converter added."""
    return lambda values: values - np.float32(offset)


def log_of_minus(values: np.ndarray) -> np.ndarray:
    """Computes ``A_log`` from the ``-exp(A_log)`` in files.

    Raises:
        ValueError: a number is not below zero.
    """
    if not np.all(np.isfinite(values) & (values < 0)):
        raise ValueError("holds a number that is not finite and below 0")
    return np.log(-values)
