"""Loops that end when the data say so, in the form that the compiler of a device takes.

XLA runs a loop as long as its condition holds. Compilers of other devices may want to know the number of iterations
before the data are there. For them a loop goes as often as it could ever have to, and each iteration is a conditional:
those after the end change nothing, and read nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax

Carry = TypeVar("Carry")

# Functions that are traced within it are traced again outside of it.
_bounded = jax.make_user_context(default_value=False)


def bounded_loops(wanted: bool) -> AbstractContextManager[Any]:
    """A block within which loops are traced with a fixed number of iterations, or (False) without."""
    context: AbstractContextManager[Any] = _bounded(wanted)
    return context


def while_loop(
    goes_on: Callable[[Carry], jax.Array], body: Callable[[Carry], Carry], start: Carry, *, most: int
) -> Carry:
    """Like ``jax.lax.while_loop``.

    Args:
        most: iterations, whatever the data; where loops are bounded, those that are not needed cost a test each.
    """
    if not _bounded.value:
        carry: Carry = jax.lax.while_loop(goes_on, body, start)
        return carry

    def once(_: jax.Array, carry: Carry) -> Carry:
        after: Carry = jax.lax.cond(goes_on(carry), body, lambda carry: carry, carry)
        return after

    return _repeat(most, once, start)


def for_loop(
    first: jax.Array | int,
    end: jax.Array | int,
    body: Callable[[jax.Array, Carry], Carry],
    start: Carry,
    *,
    most: int,
) -> Carry:
    """Like ``jax.lax.fori_loop`` from ``first`` to ``end``; ``most`` as in `while_loop`."""
    if not _bounded.value:
        carry: Carry = jax.lax.fori_loop(first, end, body, start)
        return carry

    def once(number: jax.Array, carry: Carry) -> Carry:
        index = first + number
        after: Carry = jax.lax.cond(index < end, lambda carry: body(index, carry), lambda carry: carry, carry)
        return after

    return _repeat(most, once, start)


def _repeat(count: int, once: Callable[[jax.Array, Carry], Carry], start: Carry) -> Carry:
    carry: Carry = jax.lax.fori_loop(0, count, once, start)
    return carry
