"""The pages of each group of layers, as the host manages them: a class for each kind of layer. Needs no device.

Layers that need the KV entries of the same tokens for the next one share a group: a pool of pages, and a page table for
each slot, which says in which page the KV entries of every ``page_size`` tokens are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from llmjax.arrays import Ints
from llmjax.engine.core.page_pool import DUMMY_PAGE, PageKey, PagePool
from llmjax.engine.core.request import Sequence
from llmjax.models.layers.state import AllTokens, LastState, LastTokens, Span

TABLE_CHUNK = 1024  # page table entries that a separate program writes at once
SNAPSHOTS_A_SLOT = 6  # recurrent states kept for prefix caching, besides the two that a sequence may need


@dataclass(frozen=True)
class GroupSpec:
    """The group of all layers of one span."""

    span: Span
    num_pages: int  # the dummy page included


@dataclass(frozen=True, kw_only=True)
class Load:
    """The most that the engine's sequences can ask for."""

    page_size: int  # tokens
    num_slots: int  # sequences at once
    step: int  # tokens of the largest step
    longest: int  # tokens of a sequence

    def pages(self, tokens: int) -> int:
        """Number of pages that hold ``tokens`` tokens."""
        return -(-tokens // self.page_size)


@dataclass(frozen=True)
class TableChanges:
    """Entries of page tables that the device has not seen."""

    entry: Ints  # [n], places in the flat tables [G, S, P]
    page: Ints  # [n]

    @classmethod
    def none(cls) -> TableChanges:
        return cls(np.zeros(0, np.int32), np.zeros(0, np.int32))

    @classmethod
    def of(cls, groups: Listing[LayerStates]) -> TableChanges:
        """The changes of all groups since the last call."""
        parts = [(group.table, group.take_changes()) for group in groups]
        return cls(
            entry=np.concatenate([entry + number * table.size for number, (table, entry) in enumerate(parts)]),
            page=np.concatenate([table.reshape(-1)[entry] for table, entry in parts]),
        )

    def chunks(self, room: int) -> Iterator[TableChanges]:
        """The changes in order, TABLE_CHUNK entries at a time; the last part has ``room`` at most, perhaps none."""
        at = 0
        while len(self.entry) - at > room:
            end = min(at + TABLE_CHUNK, len(self.entry))
            yield TableChanges(self.entry[at:end], self.page[at:end])
            at = end
        yield TableChanges(self.entry[at:], self.page[at:])


class LayerStates(ABC):
    """The pages of one group.

    Args:
        spec: the group's layers, and how many pages they have.
        page_size: tokens whose KV entries a page holds.
        num_slots: sequences that may run at once.
        pages_per_sequence: width of a table.
    """

    keeps_all: ClassVar[bool] = False  # whether the next token needs every page

    def __init__(self, spec: GroupSpec, *, page_size: int, num_slots: int, pages_per_sequence: int) -> None:
        self.page_size = page_size
        self.pool = PagePool(spec.num_pages)
        # By slot, as the device should have it, and the flat indices of entries that it has not been sent.
        self.table = np.zeros((num_slots, pages_per_sequence), np.int32)
        self._changes: list[int] = []

    @staticmethod
    @abstractmethod
    def useful_pages(span: Span, load: Load) -> int:
        """Most pages that can ever be used, the dummy page included."""

    @staticmethod
    @abstractmethod
    def longest_alone(spec: GroupSpec, load: Load) -> int:
        """Tokens of the longest sequence that fits if it is the only one."""

    @abstractmethod
    def first_needed(self, num_tokens: int) -> int:
        """Index of the first page that the token after the first ``num_tokens`` needs."""

    def begin_plan(self) -> None:
        """Notes that a new step is planned: what earlier steps write may be read."""
        return

    def readable(self, page: int) -> bool:
        """Whether the step that is being planned may read a page whose content is known."""
        return True

    @abstractmethod
    def attach(self, sequence: Sequence, pages: list[int | None]) -> None:
        """Gives a new sequence pages that hold its first tokens; those before the first needed may be None."""

    @abstractmethod
    def trim(self, sequence: Sequence) -> None:
        """Frees pages that no token will need, however far the steps in flight get. A step in flight may still read
        them, because steps that write to them later run after it."""

    @abstractmethod
    def missing(self, sequence: Sequence, end: int) -> int:
        """Pages without which tokens before ``end`` cannot be computed."""

    @abstractmethod
    def reserve(self, sequence: Sequence, end: int) -> None:
        """Makes room for the tokens before ``end``; there are ``missing`` pages."""

    @abstractmethod
    def room(self, sequence: Sequence) -> int:
        """Number of tokens up to which no page is missing and none can be trimmed."""

    @abstractmethod
    def fits(self, sequence: Sequence, *, chunk: int) -> bool:
        """Whether all tokens the sequence has now would find pages, so that admitting it does not lead to a preemption
        at once.

        Args:
            chunk: most tokens of it that a step computes; trimmed pages are freed between steps.
        """

    @abstractmethod
    def commit(self, sequence: Sequence, index: int, key: PageKey) -> bool:
        """Registers the content of the full page ``index``, if the sequence still has it; returns whether it is new."""

    @abstractmethod
    def held(self, sequence: Sequence) -> Iterable[int]:
        """The pages of a sequence that has been attached, oldest tokens first."""

    def forget(self, key: PageKey) -> None:
        """Removes a page with this content from the prefix cache, because it cannot be relied on."""
        if (page := self.pool.find(key)) is not None:
            self.pool.forget(page)

    def release(self, sequence: Sequence) -> None:
        """Gives every page back. Later pages go first, so that they are evicted before the prefix they continue."""
        self.pool.release(reversed(list(self.held(sequence))))
        self.table[sequence.slot] = DUMMY_PAGE

    @property
    def num_snapshots(self) -> int:
        """Grows with each snapshot of a state, which may make a prefix longer whose other pages were known before."""
        return 0

    def take_changes(self) -> Ints:
        """Flat indices of table entries that the device has not been sent; they count as sent from now on.

        The entries of a slot without a sequence do not matter, so a sequence that frees all its pages changes none.
        """
        taken, self._changes = self._changes, []
        return np.array(taken, np.int32)

    def _write(self, slot: int, start: int, pages: list[int]) -> None:
        """Sets a slot's entries from ``start`` on."""
        self.table[slot, start : start + len(pages)] = pages
        at = slot * self.table.shape[1] + start
        self._changes.extend(range(at, at + len(pages)))


class FullPages(LayerStates):
    """The KV entries of all tokens, which the next token needs: full attention."""

    keeps_all: ClassVar[bool] = True

    def __init__(self, spec: GroupSpec, *, page_size: int, num_slots: int, pages_per_sequence: int) -> None:
        super().__init__(spec, page_size=page_size, num_slots=num_slots, pages_per_sequence=pages_per_sequence)
        self._pages: dict[Sequence, list[int]] = {}  # by index; the dummy page where a page was freed

    @staticmethod
    def useful_pages(span: Span, load: Load) -> int:
        return load.num_slots * load.pages(load.longest) + 1

    @staticmethod
    def longest_alone(spec: GroupSpec, load: Load) -> int:
        return (spec.num_pages - 1) * load.page_size

    def first_needed(self, num_tokens: int) -> int:
        return 0

    def attach(self, sequence: Sequence, pages: list[int | None]) -> None:
        first = self.first_needed(len(pages) * self.page_size)
        attached = [DUMMY_PAGE] * min(first, len(pages))
        for page in pages[first:]:
            assert page is not None
            self.pool.hold(page)
            attached.append(page)
        self._pages[sequence] = attached
        self._write(sequence.slot, 0, attached)

    def trim(self, sequence: Sequence) -> None:
        return

    def missing(self, sequence: Sequence, end: int) -> int:
        return max(0, -(-end // self.page_size) - len(self._pages[sequence]))

    def reserve(self, sequence: Sequence, end: int) -> None:
        count, pages = self.missing(sequence, end), self._pages[sequence]
        if count:
            new = self.pool.allocate(count)
            assert new is not None
            self._write(sequence.slot, len(pages), new)
            pages.extend(new)

    def room(self, sequence: Sequence) -> int:
        return len(self._pages[sequence]) * self.page_size

    def fits(self, sequence: Sequence, *, chunk: int) -> bool:
        return self.missing(sequence, sequence.num_tokens) <= self.pool.available

    def commit(self, sequence: Sequence, index: int, key: PageKey) -> bool:
        page = self._pages[sequence][index]
        return page != DUMMY_PAGE and self.pool.commit(page, key)

    def held(self, sequence: Sequence) -> list[int]:
        return self._pages[sequence]

    def release(self, sequence: Sequence) -> None:
        super().release(sequence)
        del self._pages[sequence]


class WindowPages(FullPages):
    """The KV entries of the last tokens, as many as a sliding window shows; pages that it has passed are freed."""

    keeps_all: ClassVar[bool] = False

    def __init__(self, spec: GroupSpec, *, page_size: int, num_slots: int, pages_per_sequence: int) -> None:
        super().__init__(spec, page_size=page_size, num_slots=num_slots, pages_per_sequence=pages_per_sequence)
        assert isinstance(spec.span, LastTokens)
        self.window = spec.span.window

    @staticmethod
    def useful_pages(span: Span, load: Load) -> int:
        # Every slot's window, a step's tokens, and a page of slack for each.
        assert isinstance(span, LastTokens)
        windows = load.num_slots * (load.pages(span.window) + 3) + load.pages(load.step)
        return min(windows, FullPages.useful_pages(span, load))

    @staticmethod
    def longest_alone(spec: GroupSpec, load: Load) -> int:
        assert isinstance(spec.span, LastTokens)
        if spec.num_pages - 1 >= load.pages(spec.span.window + load.step) + 2:
            return load.longest
        return FullPages.longest_alone(spec, load)

    def first_needed(self, num_tokens: int) -> int:
        return max(0, num_tokens - self.window + 1) // self.page_size

    def trim(self, sequence: Sequence) -> None:
        pages = self._pages[sequence]
        last = min(self.first_needed(sequence.num_certain), len(pages)) - 1
        while last >= 0 and pages[last] != DUMMY_PAGE:
            self.pool.release([pages[last]])
            pages[last] = DUMMY_PAGE
            self._write(sequence.slot, last, [DUMMY_PAGE])
            last -= 1

    def room(self, sequence: Sequence) -> int:
        first = self.first_needed(sequence.num_certain)
        return min(super().room(sequence), (first + 1) * self.page_size + self.window - 1)

    def fits(self, sequence: Sequence, *, chunk: int) -> bool:
        # What a step's first token sees and the step's own tokens, less what the window will have passed. A page that
        # other sequences hold too is not freed.
        most = -(-(self.window + chunk - 2) // self.page_size) + 1
        own = sum(self.pool.holders(page) == 1 for page in self._pages[sequence])
        return min(self.missing(sequence, sequence.num_tokens), most - own) <= self.pool.available


@dataclass
class _Entries:
    """The pages of a sequence in a group of recurrent layers."""

    pages: dict[int, int] = field(default_factory=dict)  # by index, in order
    output: tuple[int, PageKey] | None = None  # the latest snapshot of its output: page and key


class StateSlots(LayerStates):
    """The states of recurrent layers after the last token.

    A page holds one state: the state after the last computed token of those whose table entry names the page. Tokens of
    a page rewrite it in place; the first token of the next page reads it and writes another one. So a full page remains
    as the snapshot of the state at its end, under the page's key, and nothing is copied. A sequence that continues from
    it reads it and writes a page of its own.

    The states that are kept are those at the end of a dispatch and, if there is room, at the last page boundary before:
    at the end of each chunk of a prompt, of the last full page of a prompt, and of the last full page of an output. The
    other pages that a dispatch fills have the table entry of the next one that is kept. Only the latest snapshot of an
    output stays, because a text is continued where it ended. All others stay until they are the least recently used.

    A state can be found only from the next plan on: the rows of a step begin together, so a state that another row of
    the same step computes does not exist yet.
    """

    def __init__(self, spec: GroupSpec, *, page_size: int, num_slots: int, pages_per_sequence: int) -> None:
        super().__init__(spec, page_size=page_size, num_slots=num_slots, pages_per_sequence=pages_per_sequence)
        self._entries: dict[Sequence, _Entries] = {}
        self._fresh: set[int] = set()  # pages committed since the last plan began
        self._num_snapshots = 0

    @staticmethod
    def useful_pages(span: Span, load: Load) -> int:
        boundaries = load.num_slots * load.pages(load.longest)
        return 1 + 2 * load.num_slots + min(SNAPSHOTS_A_SLOT * load.num_slots, boundaries)

    @staticmethod
    def longest_alone(spec: GroupSpec, load: Load) -> int:
        # One to read and one to write; a sequence within one page has nothing to read.
        return load.longest if spec.num_pages > 2 else load.page_size

    def first_needed(self, num_tokens: int) -> int:
        return max(0, num_tokens - 1) // self.page_size

    def begin_plan(self) -> None:
        self._fresh.clear()

    def readable(self, page: int) -> bool:
        return page not in self._fresh

    def attach(self, sequence: Sequence, pages: list[int | None]) -> None:
        entries = self._entries[sequence] = _Entries()
        if pages:
            page = pages[-1]
            assert page is not None
            self.pool.hold(page)
            entries.pages[len(pages) - 1] = page
            self._write(sequence.slot, len(pages) - 1, [page])

    def trim(self, sequence: Sequence) -> None:
        pages, first = self._entries[sequence].pages, self.first_needed(sequence.num_certain)
        for index in [index for index in pages if index < first]:
            # The host learns an output's tokens a dispatch late, and can name its states only then.
            if index < sequence.num_committed or not self._has_spare:
                self.pool.release([pages.pop(index)])

    def missing(self, sequence: Sequence, end: int) -> int:
        return int(self._last(sequence) < (end - 1) // self.page_size)

    def reserve(self, sequence: Sequence, end: int) -> None:
        if not self.missing(sequence, end):
            return
        entries = self._entries[sequence].pages
        last = (end - 1) // self.page_size
        new = self.pool.allocate(1)
        assert new is not None
        # Pages before the first token's are other sequences', or are no longer needed.
        at = max(self._last(sequence) + 1, sequence.num_computed // self.page_size)
        if at < last and self._has_spare:
            snapshot = self.pool.allocate(1)
            assert snapshot is not None
            entries[last - 1] = snapshot[0]
            self._write(sequence.slot, at, snapshot * (last - at))
            at = last
        entries[last] = new[0]
        self._write(sequence.slot, at, new * (last + 1 - at))

    def room(self, sequence: Sequence) -> int:
        first = min(self._entries[sequence].pages)
        return min((self._last(sequence) + 1) * self.page_size, (first + 1) * self.page_size + 1)

    def fits(self, sequence: Sequence, *, chunk: int) -> bool:
        # With two for each, no sequence is preempted when all reach the end of a page at once.
        missing = self.missing(sequence, sequence.num_tokens)
        return missing <= self.pool.available and 2 * len(self._entries) <= max(2, self.pool.total)

    def commit(self, sequence: Sequence, index: int, key: PageKey) -> bool:
        entries = self._entries[sequence]
        page = entries.pages.get(index)
        if page is None or not self.pool.commit(page, key):
            return False
        self._fresh.add(page)
        self._num_snapshots += 1
        if (index + 1) * self.page_size > sequence.num_prompt_tokens:
            if entries.output is not None:
                self._supersede(sequence, *entries.output)
            entries.output = (page, key)
        return True

    def held(self, sequence: Sequence) -> Iterable[int]:
        return self._entries[sequence].pages.values()

    def release(self, sequence: Sequence) -> None:
        super().release(sequence)
        del self._entries[sequence]

    @property
    def num_snapshots(self) -> int:
        return self._num_snapshots

    @property
    def _has_spare(self) -> bool:
        """Whether a page may be used for a snapshot: each sequence may need one more page in this plan."""
        return self.pool.available >= max(1, len(self._entries))

    def _last(self, sequence: Sequence) -> int:
        """Index of the last page that the sequence has; -1 if it has none."""
        return max(self._entries[sequence].pages, default=-1)

    def _supersede(self, sequence: Sequence, page: int, key: PageKey) -> None:
        own = int(page in self._entries[sequence].pages.values())
        if self.pool.find(key) == page and self.pool.holders(page) == own:
            self.pool.forget(page)


_KINDS: dict[type[Span], type[LayerStates]] = {AllTokens: FullPages, LastTokens: WindowPages, LastState: StateSlots}


def kind_of(span: Span) -> type[LayerStates]:
    """The class that manages the pages of layers of a span."""
    return _KINDS[type(span)]
