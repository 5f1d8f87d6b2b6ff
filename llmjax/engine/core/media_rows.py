"""The rows of the device's media pool: which image has which, and which images the encoder is asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from llmjax.arrays import Ints
from llmjax.engine.core.adapters import AdapterSlots
from llmjax.engine.core.media import EncoderAdapter, Encoding, PromptImage, key_of
from llmjax.engine.core.request import Sequence
from llmjax.media.image import PreparedImage


@dataclass(eq=False)
class _Entry:
    """An image that is encoded, or that the encoder has been asked for."""

    key: bytes  # see `Encoding`
    places: Ints
    holders: int = 0
    encoded: bool = False


class MediaRows:
    """The rows of the device's media pool: given to images when a step needs them, and kept by the images' digests
    until others need the room. Where adapters change the encoder, each has rows of its own.

    A running sequence holds an image from the plan that needs the first of its tokens to the plan after the last one.
    As it waits with no image half computed, and with none but those that the encoder brings anyway, a pool that has
    room for any image has room for all. A sequence that is not running holds nothing.

    Args:
        num_rows: rows of the pool, at least those of the largest image.
        budget: most rows of images that the encoder has been asked for and has not brought; one image always is, and
            those of a prompt that is computed in one step.
        adapters: say what adapters change of the encoder; None: there are none.
    """

    def __init__(self, num_rows: int = 0, *, budget: int = 0, adapters: AdapterSlots | None = None) -> None:
        self.num_rows = num_rows
        self.budget = budget
        self._adapters = adapters
        self._queries = self._asked = 0  # images that sequences have been given, and of these encoded for them
        self._free = list(range(num_rows))
        self._entries: dict[bytes, _Entry] = {}  # by key
        self._idle: OrderedDict[bytes, _Entry] = OrderedDict()  # encoded, nobody holds them; least recently held first
        self._held: dict[Sequence, dict[int, _Entry]] = {}  # by the number of the image in the prompt
        self._awaited: dict[Sequence, list[_Entry]] = {}  # what keeps a sequence from going on
        self._encodings: list[Encoding] = []
        self._left = budget

    def begin_plan(self) -> None:
        """Lets go of the images whose tokens all earlier steps have computed."""
        for sequence, held in list(self._held.items()):
            media = sequence.request.media
            assert media is not None
            for number in [number for number in held if media.images[number].end <= sequence.num_computed]:
                self._let_go(held.pop(number))
            if not held:
                del self._held[sequence]

    def reach(self, sequence: Sequence, count: int) -> int:
        """How many of a sequence's next ``count`` tokens can be computed now: those before the first image that is not
        encoded. The images of others are held, and so is that one; the encoder is asked for it, and for those after it
        as far as there is room."""
        media, start = sequence.request.media, sequence.num_computed
        if media is None or start >= media.end:
            return count
        end = media.floor(start + count)
        if end <= start:
            return 0  # and holds nothing
        awaited: list[_Entry] = []
        for place, (number, image) in enumerate(media.between(start, end)):
            before = media.floor(image.start)
            beside = place > 0 and before < image.start  # it has to come with the one before
            if awaited and not beside:
                break
            entry = self._hold(sequence, number, image.image, beside=beside)
            if entry is None:
                end, awaited = max(before, start), []
                self._let_go_from(sequence, end)
                break
            if not entry.encoded:
                awaited.append(entry)
                end = min(end, max(before, start))
        if awaited:
            self._look_ahead(sequence, media.images[number:])
        if awaited and end == start:
            self._awaited[sequence] = awaited
        else:
            self._awaited.pop(sequence, None)
        return end - start

    def awaits(self, sequence: Sequence) -> bool:
        """Whether a sequence cannot go on before the encoder has brought an image that it has been asked for."""
        return any(not entry.encoded for entry in self._awaited.get(sequence, ()))

    def arrived(self, encodings: Iterable[Encoding]) -> None:
        """Images are encoded before all later steps."""
        for encoding in encodings:
            entry = self._entries[encoding.key]
            entry.encoded = True
            self._left += len(entry.places)
            if not entry.holders:
                self._idle[entry.key] = entry

    def take_encodings(self) -> list[Encoding]:
        """The images that the encoder is asked for; each is told once."""
        encodings, self._encodings = self._encodings, []
        return encodings

    def take_counts(self) -> tuple[int, int]:
        """How many images sequences have been given, and how many the encoder was asked for; each is told once."""
        counts, self._queries, self._asked = (self._queries, self._asked), 0, 0
        return counts

    def places(self, sequence: Sequence, number: int) -> Ints:
        """The rows of an image that the sequence holds, i32 [num_rows]."""
        return self._held[sequence][number].places

    def release(self, sequence: Sequence) -> None:
        """Lets go of all images of a sequence, which has ended or is to begin again."""
        self._awaited.pop(sequence, None)
        self.put_off(sequence)

    def put_off(self, sequence: Sequence) -> None:
        """Lets go of all images of a sequence that has not begun, and remembers what it waits for."""
        for entry in self._held.pop(sequence, {}).values():
            self._let_go(entry)

    def abandon(self, encodings: Iterable[Encoding]) -> None:
        """The encoder will not bring some images, which nobody holds."""
        for encoding in encodings:
            entry = self._entries.pop(encoding.key)
            self._free += entry.places.tolist()
            self._left += len(entry.places)

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
        idle = {key for key, entry in self._entries.items() if entry.encoded and not entry.holders}
        assert idle == self._idle.keys()
        coming = sum(len(entry.places) for entry in self._entries.values() if not entry.encoded)
        assert self._left == self.budget - coming

    @property
    def free(self) -> int:
        """Rows that no image has."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Rows of images that sequences hold."""
        return sum(len(entry.places) for entry in self._entries.values() if entry.holders)

    def _hold(self, sequence: Sequence, number: int, image: PreparedImage, *, beside: bool) -> _Entry | None:
        """Has a sequence hold an image, which the encoder is asked for if nobody has; None: there is no room now.

        Args:
            beside: it has to come with the one before it, so the budget, which that one has passed, does not count.
        """
        held = self._held.get(sequence, {})
        if number in held:
            return held[number]
        adapter = self._adapter(sequence)
        entry = self._entries.get(key_of(image, adapter))
        if entry is None:
            if not beside and image.num_rows > self._left < self.budget:
                return None
            if (places := self._room(image.num_rows)) is None:
                return None
            entry = self._ask(Encoding(image, places, adapter))
        if entry not in self._awaited.get(sequence, ()):
            self._queries += 1
        self._idle.pop(entry.key, None)
        entry.holders += 1
        self._held.setdefault(sequence, held)[number] = entry
        return entry

    def _ask(self, encoding: Encoding) -> _Entry:
        """Has the encoder asked for an image."""
        entry = self._entries[encoding.key] = _Entry(encoding.key, encoding.places)
        self._encodings.append(encoding)
        self._asked += 1
        self._left -= len(encoding.places)
        return entry

    def _adapter(self, sequence: Sequence) -> EncoderAdapter | None:
        """With what the images of a sequence are encoded, which runs or may run now."""
        adaptation = sequence.request.adaptation
        return None if adaptation is None or self._adapters is None else self._adapters.of_encoder(adaptation)

    def _look_ahead(self, sequence: Sequence, images: Iterable[PromptImage]) -> None:
        """Has the encoder asked for the next images of a prompt, if rows are free, so that it takes them together."""
        adapter = self._adapter(sequence)
        for one in images:
            image = one.image
            if key_of(image, adapter) in self._entries:
                continue
            if image.num_rows > self._left or image.num_rows > len(self._free):
                return
            places = self._room(image.num_rows)
            assert places is not None
            self._ask(Encoding(image, places, adapter))

    def _let_go_from(self, sequence: Sequence, start: int) -> None:
        """Lets go of the images whose tokens are all from ``start`` on: none is held while its sequence waits."""
        media, held = sequence.request.media, self._held.get(sequence, {})
        assert media is not None
        for number in [number for number in held if media.images[number].start >= start]:
            self._let_go(held.pop(number))

    def _let_go(self, entry: _Entry) -> None:
        entry.holders -= 1
        if not entry.holders and entry.encoded:
            self._idle[entry.key] = entry

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
        key, entry = self._idle.popitem(last=False)
        del self._entries[key]
        self._free += entry.places.tolist()
