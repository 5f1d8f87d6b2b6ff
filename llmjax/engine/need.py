"""What an engine needs of a machine, as plain data: engines that share one are told when they may take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MEMORY = "memory"  # the resource that is counted in bytes of the machine's memory
CARD = 1_000_000  # a whole card, whose memory is counted in such parts


def card(number: int) -> str:
    """The resource that a card's memory is."""
    return f"card {number}"


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a loaded engine takes.

    Args:
        weight_bytes: bytes of the machine's memory for weights; on an accelerator, what its process takes beside them.
        kv_bytes: bytes of it for the KV cache, which a sleeping engine gives back.
        other_bytes: bytes of it for everything else.
        cards: parts of each accelerator's memory, by number; a process keeps them until it ends.
    """

    weight_bytes: int
    kv_bytes: int
    other_bytes: int
    cards: Mapping[int, int] = field(default_factory=dict)

    @property
    def awake(self) -> dict[str, int]:
        """Amounts of each resource."""
        return {MEMORY: self.weight_bytes + self.kv_bytes + self.other_bytes, **self._cards}

    @property
    def asleep(self) -> dict[str, int]:
        """Amounts that remain while the engine sleeps."""
        return {MEMORY: self.weight_bytes + self.other_bytes, **self._cards}

    @property
    def _cards(self) -> dict[str, int]:
        return {card(number): parts for number, parts in self.cards.items()}
