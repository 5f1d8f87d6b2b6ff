"""The sequences that wait: one queue for each adapter, so that those whose adapter has no slot let the others pass."""

from __future__ import annotations

import heapq

from llmjax.engine.core.adapters import AdapterSlots
from llmjax.engine.core.request import Sequence, Status

Rank = tuple[int, int]


class WaitingQueue:
    """Sequences by rank; those that have ended meanwhile are left out.

    Args:
        adapters: the device's slots for adapters; None: there are no adapters.
    """

    def __init__(self, adapters: AdapterSlots | None) -> None:
        self._adapters = adapters
        self._heaps: dict[str | None, list[tuple[Rank, Sequence]]] = {}  # by digest of the adapter

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        heapq.heappush(self._heaps.setdefault(sequence.digest, []), (sequence.rank, sequence))

    def first(self) -> Sequence | None:
        """The first sequence that may run now, as far as its adapter is concerned."""
        heads = self.heads()
        if self._adapters is None:
            return heads[0] if heads else None
        passing = self._adapters.passing([one for head in heads if (one := head.request.adaptation) is not None])
        return next((head for head in heads if head.digest is None or head.digest in passing), None)

    def pop(self, sequence: Sequence) -> int:
        """Takes out the sequence that ``first`` has returned; returns the slot of its adapter, which it has now."""
        slot, adaptation = 0, sequence.request.adaptation
        if adaptation is not None:
            assert self._adapters is not None, "the front lets no request with an adapter pass"
            waiting = [one for head in self.heads() if (one := head.request.adaptation) is not None]
            slot = self._adapters.take(adaptation, waiting)
        heapq.heappop(self._heaps[sequence.digest])
        return slot

    def leave(self, sequence: Sequence) -> None:
        """Takes out the sequence that ``first`` has returned, which cannot run now for another reason."""
        heapq.heappop(self._heaps[sequence.digest])

    def of(self, digest: str) -> list[Sequence]:
        """The sequences that wait for an adapter."""
        return [sequence for _, sequence in self._heaps.get(digest, ()) if sequence.status is Status.WAITING]

    def heads(self) -> list[Sequence]:
        """The first sequence of each adapter, by rank."""
        heads: list[Sequence] = []
        for digest, heap in list(self._heaps.items()):
            while heap and heap[0][1].status is not Status.WAITING:
                heapq.heappop(heap)
            if heap:
                heads.append(heap[0][1])
            else:
                del self._heaps[digest]
        return heads if len(heads) < 2 else sorted(heads, key=lambda sequence: sequence.rank)
