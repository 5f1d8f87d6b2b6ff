"""What Python's garbage collector need not look at, in a process that only serves.

A full collection visits every object, and all threads wait for it: with JAX and a model's programs loaded that is a
tenth of a second in which no stream gets a token. What was built at start stays until the process ends, so it is put
aside (``gc.freeze``), as vLLM and Instagram's servers do.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Around what makes much that stays, such as imports and models: looking for garbage takes a tenth of its time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def permanent() -> Iterator[None]:
    """Around imports: modules are not searched for garbage, now or later, which also makes them load faster."""
    with paused():
        try:
            yield
        finally:
            put_aside()


def put_aside() -> None:
    """Everything that is there now is taken for permanent; what leaves references alone is freed as ever."""
    gc.freeze()
