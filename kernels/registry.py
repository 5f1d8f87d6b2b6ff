"""Operations and their implementations: which one serves which device, types and shapes, and why."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

DEVICE_PLATFORMS = {"gpu": "cuda"}  # devices and lowering have different names for one platform

_only: Any = jax.make_user_context(default_value=None)  # a part of the keys of JAX's caches


def traced_for(platform: str) -> AbstractContextManager[Any]:
    """A block within which operations are traced for one platform, not once for each that a program might be lowered
    for: that takes time, and other platforms' kernels are imported for it."""
    context: AbstractContextManager[Any] = _only(platform)
    return context


def traced_platform() -> str | None:
    """The platform that operations are traced for; None: any."""
    platform: str | None = _only.value
    return DEVICE_PLATFORMS.get(platform or "", platform)


def _takes_all(*arguments: Any, **options: Any) -> str | None:
    return None


def later(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported when the function is first called: most processes never need it."""

    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments, **options)

    return call


class Operands:
    """Arguments of a call: arrays and pytrees of them by position, static settings by name."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments = arguments
        self.options = options

    def given_to(self, function: Callable[..., Any]) -> Any:
        """Calls a function with them."""
        return function(*self.arguments, **self.options)


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Args:
        name: for people.
        run: called with the operation's arguments while tracing.
        platform: the PJRT platform it is made for; None: any.
        refuses: why it cannot, or should not, take these arguments (only shapes and types are looked at); None: it can.
    """

    name: str
    run: Callable[..., Any]
    platform: str | None = None
    refuses: Callable[..., str | None] = _takes_all

    def taking(self, operands: Callable[..., Operands]) -> Implementation:
        """The same for an operation with other arguments, which ``operands`` turns into those of this one."""
        return replace(
            self,
            run=lambda *arguments, **options: operands(*arguments, **options).given_to(self.run),
            refuses=lambda *arguments, **options: operands(*arguments, **options).given_to(self.refuses),
        )


@dataclass(frozen=True)
class Operation:
    """A documented operation with its implementations, the best first; the last one takes everything everywhere."""

    name: str
    implementations: tuple[Implementation, ...]

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Runs the implementation for the platform that the program is lowered for, or `traced_for` says.

        Args:
            arguments: arrays, or pytrees of them.
            options: static settings.
        """
        if _only.value is not None:
            return self.pick(_only.value, *arguments, **options).run(*arguments, **options)
        default = self.pick(None, *arguments, **options)
        platforms = {i.platform for i in self.implementations if i.platform is not None}
        special = {p: self.pick(p, *arguments, **options) for p in sorted(platforms)}
        ways = {p: partial(i.run, **options) for p, i in special.items() if i is not default}
        run = partial(default.run, **options)
        return jax.lax.platform_dependent(*arguments, default=run, **ways) if ways else run(*arguments)

    def pick(self, platform: str | None, *arguments: Any, **options: Any) -> Implementation:
        """The implementation for a platform (None: one of which nothing is known).

        Args:
            arguments: arrays or ``jax.ShapeDtypeStruct``s, and pytrees of them.
        """
        platform = DEVICE_PLATFORMS.get(platform or "", platform)
        for implementation in self.implementations:
            if implementation.platform in (None, platform) and not implementation.refuses(*arguments, **options):
                return implementation
        raise LookupError(f"{self.name}: no implementation takes these arguments")

    def explain(self, platform: str | None, *arguments: Any, **options: Any) -> str:
        """The pick by name, with why better ones were passed over."""
        picked = self.pick(platform, *arguments, **options)
        platform = DEVICE_PLATFORMS.get(platform or "", platform)
        passed_over = []
        for implementation in self.implementations[: self.implementations.index(picked)]:
            if implementation.platform in (None, platform):
                passed_over.append(f"{implementation.name}: {implementation.refuses(*arguments, **options)}")
        return f"{picked.name} ({'; '.join(passed_over)})" if passed_over else picked.name
