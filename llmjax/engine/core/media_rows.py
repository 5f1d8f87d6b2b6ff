"""The rows of the device's media pool: which image has which, and which images are encoded next."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from llmjax.arrays import Ints
from llmjax.engine.core.media import Encoding
from llmjax.engine.core.request import Sequence
from llmjax.media.image import PreparedImage


@dataclass(eq=False)
class _Entry:
    """An image that is encoded, or will be before the step that is being planned."""

    digest: bytes
    places: Ints
    holders: int = 0


class MediaRows:
    """The rows of the device's media pool: given to images when a step needs them, and kept by the images' digests
    until others need the room.

    A sequence holds an image from the plan that computes the first of its tokens to the plan after the last one. As it
    waits with no image half computed but the one that it holds, a pool that has room for any image has room for all.

    Args:
        num_rows: rows of the pool, at least those of the largest image.
        budget: most rows that are encoded before one step; one image always is, and those of a prompt that is
            computed in one step.
    """

    def __init__(self, num_rows: int = 0, *, budget: int = 0) -> None:
        self.num_rows = num_rows
        self.budget = budget
        self._queries = 0  # images that sequences have been given since the last plan
        self._free = list(range(num_rows))
        self._entries: dict[bytes, _Entry] = {}
        self._idle: OrderedDict[bytes, _Entry] = OrderedDict()  # entries that nobody holds, least recently held first
        self._held: dict[Sequence, dict[int, _Entry]] = {}  # by the number of the image in the prompt
        self._encodings: list[Encoding] = []
        self._left = 0

    def begin_plan(self) -> None:
        """Lets go of the images whose tokens all earlier steps have computed."""
        self._left = self.budget
        for sequence, held in list(self._held.items()):
            media = sequence.request.media
            assert media is not None
            for number in [number for number in held if media.images[number].end <= sequence.num_computed]:
                self._let_go(held.pop(number))
            if not held:
                del self._held[sequence]

    def reach(self, sequence: Sequence, count: int) -> int:
        """How many of a sequence's next ``count`` tokens can be computed now: those before the first image that does
        not come into the pool with this plan. The others are held."""
        media, start = sequence.request.media, sequence.num_computed
        if media is None or start >= media.end:
            return count
        end = media.floor(start + count)
        if end <= start:
            return 0  # and holds nothing
        for place, (number, image) in enumerate(media.between(start, end)):
            before = media.floor(image.start)
            if not self._hold(sequence, number, image.image, beside=place > 0 and before < image.start):
                end = max(before, start)
                self._let_go_from(sequence, end)
                break
        return end - start

    def take_encodings(self) -> list[Encoding]:
        """The images to encode before the planned step; each is told once."""
        encodings, self._encodings = self._encodings, []
        return encodings

    def take_queries(self) -> int:
        """How many images sequences have been given in this plan; each is told once."""
        queries, self._queries = self._queries, 0
        return queries

    def places(self, sequence: Sequence, number: int) -> Ints:
        """The rows of an image that the sequence holds, i32 [num_rows]."""
        return self._held[sequence][number].places

    def release(self, sequence: Sequence) -> None:
        """Lets go of all images of a sequence."""
        for entry in self._held.pop(sequence, {}).values():
            self._let_go(entry)

    def forget(self) -> None:
        """Forgets the images that nobody holds."""
        while self._idle:
            self._drop()

    def check(self) -> None:
        """Raises AssertionError if a row is lost or is in two places."""
        listed = [row for entry in self._entries.values() for row in entry.places.tolist()]
        assert sorted(listed + self._free) == list(range(self.num_rows))
        holders = [entry for held in self._held.values() for entry in held.values()]
        assert all(entry.holders == holders.count(entry) for entry in self._entries.values())
        assert {digest for digest, entry in self._entries.items() if not entry.holders} == self._idle.keys()

    @property
    def used(self) -> int:
        """Rows of images that sequences hold."""
        return sum(len(entry.places) for entry in self._entries.values() if entry.holders)

    def _hold(self, sequence: Sequence, number: int, image: PreparedImage, *, beside: bool) -> bool:
        """Whether a sequence holds an image now; ``beside``: it has to come with the one before it, so the budget,
        which that one has passed, does not count."""
        held = self._held.get(sequence, {})
        if number in held:
            return True
        entry = self._entries.get(image.digest)
        if entry is None:
            if (not beside and image.num_rows > self._left < self.budget) or (
                places := self._room(image.num_rows)
            ) is None:
                return False
            self._left -= image.num_rows
            entry = self._entries[image.digest] = _Entry(image.digest, places)
            self._encodings.append(Encoding(image, places))
        self._queries += 1
        self._idle.pop(image.digest, None)
        entry.holders += 1
        self._held.setdefault(sequence, held)[number] = entry
        return True

    def _let_go_from(self, sequence: Sequence, start: int) -> None:
        """Lets go of the images whose tokens are all from ``start`` on: none is held while its sequence waits."""
        media, held = sequence.request.media, self._held.get(sequence, {})
        assert media is not None
        for number in [number for number in held if media.images[number].start >= start]:
            self._let_go(held.pop(number))

    def _let_go(self, entry: _Entry) -> None:
        entry.holders -= 1
        if not entry.holders:
            self._idle[entry.digest] = entry

    def _room(self, count: int) -> Ints | None:
        """Free rows, after images that nobody holds have been forgotten; None: there are fewer."""
        if count > len(self._free) + sum(len(entry.places) for entry in self._idle.values()):
            return None
        while len(self._free) < count:
            self._drop()
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return np.array(taken, np.int32)

    def _drop(self) -> None:
        digest, entry = self._idle.popitem(last=False)
        del self._entries[digest]
        self._free += entry.places.tolist()
