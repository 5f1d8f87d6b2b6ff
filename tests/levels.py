"""At which level of the tests each of many cases is: see the markers in pyproject.toml."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def at_levels(
    cases: Iterable[Any], *, fast: Collection[Any] = (), slow: Collection[Any] = (), jax_api: Collection[Any] = ()
) -> list[Any]:
    """Cases for `pytest.mark.parametrize`.

    Args:
        cases: all of them; tuples are values of several arguments.
        fast: those that every run has.
        slow: those that runs of slow tests have; what is in neither is exhaustive.
        jax_api: those that are run with the newest JAX as well.

    Raises:
        ValueError: a case of a level is none of the cases.
    """
    cases = list(cases)
    if unknown := [case for case in (*fast, *slow, *jax_api) if case not in cases]:
        raise ValueError(f"there are no such cases: {unknown}")

    def marks(case: Any) -> Any:
        level = () if case in fast else (pytest.mark.slow if case in slow else pytest.mark.exhaustive,)
        return (*level, pytest.mark.jax_api) if case in jax_api else level

    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks(case)) for case in cases]
