"""What one of several equal engines of a machine gets of it: devices, cores, threads, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class MachineShare:
    """The share of one engine.

    Attributes:
        rank: which engine it is, from 0 on.
        count: engines that divide the machine.
        host_memory: bytes of the machine's memory that the engine may take; None: all that is free.
    """

    rank: int = 0
    count: int = 1
    host_memory: int | None = None

    @property
    def is_whole(self) -> bool:
        """There is no other engine."""
        return self.count == 1

    @property
    def name(self) -> str:
        """What people call the engine."""
        return f"engine {self.rank}"

    def part(self, items: Sequence[Item]) -> Sequence[Item]:
        """Its consecutive items, each engine's as many as another's or one more; where there are fewer items than
        engines, one that it shares with its neighbors."""
        first = self.rank * len(items) // self.count
        last = (self.rank + 1) * len(items) // self.count
        return items[first : max(last, first + 1)]


WHOLE_MACHINE = MachineShare()
