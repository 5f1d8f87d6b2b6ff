"""How tests wait: for what they name, without limits of their own. pytest ends a test that waits in vain (see
``timeout`` in pyproject.toml) and shows where."""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Callable


def until(condition: Callable[[], object]) -> None:
    """Returns when the condition holds, for states that change without a word."""
    while not condition():
        time.sleep(0.005)


async def until_async(condition: Callable[[], object]) -> None:
    """Like `until`, while the event loop runs on."""
    while not condition():
        await asyncio.sleep(0.005)


def until_ended(pid: int) -> None:
    """Returns when a process has ended, whoever started it; one that nobody has waited for has ended, too."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([process], [], [])
    finally:
        os.close(process)
