"""Which method multiplies rows with matrices of a kind: what was measured of it, and what was chosen.

Methods of CPUs are meant: those of ``cpu/matrices.py`` for quantized matrices, and for plain ones C++ or XLA's dot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax

from llmjax.kernels.qtensor import QTensor

NATIVE, BY_XLA = "C++", "XLA"
"""The methods for plain matrices."""
TABLE = "table"
"""What is written down for the instruction set (``src/methods.cc``, `matrices.slow`), whichever method that is."""
ROWS = (1, 4, 8, 16, 32, 64, 128, 512)
"""Numbers of rows that are measured; a choice for one holds down to the one before."""

MARGIN = 0.1


@dataclass(frozen=True)
class Timing:
    """How long one method took for one product.

    Attributes:
        kind: the matrix's kind, see `kind_of`.
        method: name of the method, or TABLE.
        shape: [out, in] of the matrix.
        rows: rows of x.
        seconds: the least time of a core in several runs.
    """

    kind: str
    method: str
    shape: tuple[int, int]
    rows: int
    seconds: float


@dataclass(frozen=True)
class Choice:
    """The methods for matrices of one kind.

    Attributes:
        steps: rows and a method for up to that many, ascending; the last one holds for more rows as well.
    """

    kind: str
    steps: tuple[tuple[int, str], ...]

    def method(self, rows: int) -> str:
        """The method for a number of rows."""
        return next((method for most, method in self.steps if rows <= most), self.steps[-1][1])


@dataclass(frozen=True)
class Choices:
    """The choices of a model's programs; kinds without one go by the table."""

    made: tuple[Choice, ...] = ()

    def of(self, kind: str) -> Choice | None:
        """The choice for matrices of a kind; None: the table's."""
        return next((choice for choice in self.made if choice.kind == kind), None)


_current: Any = jax.make_user_context(default_value=Choices())  # a part of the keys of JAX's caches


def choosing(choices: Choices) -> AbstractContextManager[Any]:
    """A block within which products are traced with these choices."""
    context: AbstractContextManager[Any] = _current(choices)
    return context


def choice_of(weight: jax.Array | jax.ShapeDtypeStruct | QTensor) -> Choice | None:
    """The choice for a matrix in the surrounding block of `choosing`; None: the table's."""
    choices: Choices = _current.value
    return choices.of(kind_of(weight)) if choices.made else None


def kind_of(weight: jax.Array | jax.ShapeDtypeStruct | QTensor) -> str:
    """All that decides about methods besides sizes: the type, or codes, groups and scales, and what x is rounded to."""
    if not isinstance(weight, QTensor):
        return str(weight.dtype)
    form = weight.format
    codes = (
        f"{form.codes.bits} bits, {form.codes.kind}{f' of {len(form.codes.levels)} levels' * bool(form.codes.levels)}"
    )
    group = "a row" if form.group_size >= form.size_in else str(form.group_size)
    above = f" of {form.super_size} ({form.super_scale})" if form.super_size else ""
    numbers = "/".join(str(number) for number in (form.scale, form.zero, form.minimum) if number not in ("", 0))
    return f"{codes}, groups of {group}{above} ({numbers}), x {weight.activations}, {weight.dtype}"


def decide(
    timings: Sequence[Timing], table: Mapping[int, str], *, margin: float = MARGIN
) -> tuple[tuple[int, str], ...]:
    """Steps of a `Choice` from what was measured of one kind. Between two that are about as fast the table decides, or
    the choice for fewer rows.

    Args:
        timings: what some shapes took, each with the same methods and rows; times of shapes are added up.
        table: the method that stays for a number of rows unless another is clearly faster.
        margin: by which part of that method's time another has to be faster.

    Returns:
        Rows and a method for up to that many; empty: the table stays for all.
    """
    totals: dict[int, dict[str, float]] = {}
    for timing in timings:
        methods = totals.setdefault(timing.rows, {})
        methods[timing.method] = methods.get(timing.method, 0.0) + timing.seconds
    steps: list[tuple[int, str]] = []
    for rows, methods in sorted(totals.items()):
        best = min(methods, key=lambda method: methods[method])
        clearly = methods[best] < (1 - margin) * methods[table[rows]]
        method = best if clearly or (steps and steps[-1][1] == best) else table[rows]
        if steps and steps[-1][1] == method:
            steps.pop()
        steps.append((rows, method))
    made = Choice("", tuple(steps))
    return () if all(made.method(rows) == method for rows, method in table.items()) else made.steps
