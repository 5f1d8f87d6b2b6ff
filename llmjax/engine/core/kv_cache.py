"""What is kept of every sequence by all groups of layers: prefix reuse, growth, release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from llmjax.engine.core.layer_states import GroupSpec, LayerStates, StateSlots, kind_of
from llmjax.engine.core.page_pool import PageKey, PagePool
from llmjax.engine.core.request import Sequence
from llmjax.engine.core.stats import KVStats, OffloadCounts
from llmjax.engine.device.rows import TableChanges
from llmjax.engine.tiers.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvents
from llmjax.engine.tiers.host import KeptPage, PageName
from llmjax.engine.tiers.offload import HOST, Contents, Fetch, Offload, PageDevice, Source

AWAY = -1  # in place of a page: it is not on the device, but can be restored


class KVCache:
    """The pages of all sequences.

    Args:
        specs: the groups of layers, one per distinct span.
        page_size: tokens a page.
        num_slots: sequences that may run at once.
        pages_per_sequence: width of a page table.
        share_prefixes: whether different requests may share pages (continuations of one request always do).
        prompt_kind: of a prompt's length; prompts of different kinds have different keys for the same tokens.
        offload: takes the pages that are evicted, and has them restored; None: they are lost.
        events: takes down which pages can be found; None: nobody wants to know.
        taker: gets pages under a name from another server; None: no other server has any.
    """

    def __init__(
        self,
        specs: tuple[GroupSpec, ...],
        *,
        page_size: int,
        num_slots: int,
        pages_per_sequence: int,
        share_prefixes: bool = True,
        prompt_kind: Callable[[int], tuple[int, ...]] = lambda prompt_len: (),
        offload: Offload | None = None,
        events: CacheEvents | None = None,
        taker: Callable[..., Iterator[tuple[PageName, KeptPage]]] | None = None,
    ) -> None:
        self.page_size = page_size
        self.share_prefixes = share_prefixes
        self._prompt_kind = prompt_kind
        self.groups: list[LayerStates] = [
            kind_of(spec.span)(spec, page_size=page_size, num_slots=num_slots, pages_per_sequence=pages_per_sequence)
            for spec in specs
        ]
        self._offload = offload
        self._fetches: dict[Sequence, Fetch] = {}
        self._events = events
        self._taker = taker
        for watcher in (offload, events):
            if watcher is not None:
                watcher.watch(self.pools)

    @property
    def pools(self) -> list[PagePool]:
        """Of each group."""
        return [group.pool for group in self.groups]

    def take_changes(self) -> TableChanges:
        """What has changed in the tables [G, num_slots, pages_per_sequence] since the last time this was asked."""
        parts = [(group.table, group.take_changes()) for group in self.groups]
        return TableChanges(
            entry=np.concatenate([entry + number * table.size for number, (table, entry) in enumerate(parts)]),
            page=np.concatenate([table.reshape(-1)[entry] for table, entry in parts]),
        )

    def begin_plan(self) -> None:
        """A new step is planned; until the next one, `attach_prefix` finds nothing that would have to run before it."""
        for group in self.groups:
            group.begin_plan()
        if self._offload is not None:
            self._offload.begin_plan()

    def attach_prefix(self, sequence: Sequence) -> int | None:
        """Gives a sequence the cached pages of its longest known prefix.

        At least one token is left to compute, because its logits are needed.

        Returns:
            Tokens covered by the attached pages; None, and nothing is attached, if the step under way computes more of
            them, so that it is better to wait for the next plan.
        """
        sequence.num_committed = sequence.num_computed = sequence.room = 0
        known = self._known_pages(sequence)
        length = self._longest_hit(known)
        if any(group.fresh for group in self.groups):
            soon = self._longest_hit(self._known_pages(sequence, soon=True))
            if soon > length:
                return None
        if self._offload is None:
            for group, pages in zip(self.groups, known, strict=True):
                group.attach(sequence, pages[:length])
        else:
            length = self._attach_and_restore(sequence, self._offload, length)
            self.end_fetch(sequence)
        sequence.num_committed = length
        sequence.num_computed = length * self.page_size
        return sequence.num_computed

    def fetch(self, sequence: Sequence) -> bool:
        """Whether it is worth to wait, until `fetched`, for pages of a sequence's prefix that are on disk."""
        offload = self._offload
        if offload is None or not self.share_prefixes:
            return False
        source = self._source(sequence)
        if source is None and not offload.has_disk:
            return False
        most = offload.most_fetched // max(1, sum(offload.page_bytes))
        known = self._known_pages(sequence, on_disk=True)
        length = self._longest_hit([pages[:most] for pages in known])
        if source is not None:
            # All that is not here: the other server has what the next token needs.
            there = min(self._sharable_pages(sequence), most)
            source, length = (source, there) if there > length else (None, length)
        names = []
        for number, (group, pages) in enumerate(zip(self.groups, known, strict=True)):
            for index in range(group.first_needed(length * self.page_size), length):
                key = self._key(sequence, index)
                if (pages[index] if index < len(pages) else None) in (AWAY, None) and group.find(key) is None:
                    names.append((number, key.digest))
        if (fetch := offload.fetch(names, source)) is None:
            return False
        self._fetches[sequence] = fetch
        return True

    def _source(self, sequence: Sequence) -> Source | None:
        """The other server that has computed the prompt."""
        transfer = sequence.request.params.kv_transfer
        if self._taker is None or transfer is None or transfer.take is None or sequence.index:
            return None
        return partial(self._taker, transfer.take, peer=transfer.peer)

    def give(self, sequence: Sequence, device: PageDevice) -> list[tuple[int, list[PageKey], Contents]]:
        """Starts to read out the pages of a prompt that has been computed, by group, as many as can be shared."""
        count = (sequence.num_prompt_tokens - 1) // self.page_size
        known = [pages[:count] for pages in self._known_pages(sequence, soon=True)]
        length, given = self._longest_hit(known), []
        for number, (group, pages) in enumerate(zip(self.groups, known, strict=True)):
            first = group.first_needed(length * self.page_size)
            keys = [self._key(sequence, index) for index in range(first, length)]
            needed = [page for page in pages[first:length] if page is not None]
            if keys:
                given.append((number, keys, device.read_pages(number, needed)))
        return given

    def fetched(self, sequence: Sequence, *, seconds: float = 0.0) -> bool:
        """Whether a sequence has nothing to wait for any more.

        Args:
            seconds: to wait for any sequence's pages.
        """
        fetch = self._fetches.get(sequence)
        return fetch is None or self._offload is None or self._offload.arrived(fetch, seconds=seconds)

    def end_fetch(self, sequence: Sequence) -> None:
        """It has been given pages, or will not be; a second time nothing happens."""
        if self._offload is not None and (fetch := self._fetches.pop(sequence, None)) is not None:
            self._offload.end_fetch(fetch)

    def move_pages(self, device: PageDevice) -> None:
        """Moves the pages that leave the device with the step that is planned, or come back for it. The step is to be
        dispatched after it."""
        if self._offload is not None:
            self._offload.move(device)

    def take_offload_counts(self) -> OffloadCounts:
        """What has been moved since the last time."""
        return OffloadCounts() if self._offload is None else self._offload.take_counts()

    def close(self, device: PageDevice) -> None:
        """Keeps what later starts may find."""
        if self._offload is not None:
            self._offload.close(device, self.pools)

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room for the next ``num_tokens`` tokens in every group, or changes nothing and returns False."""
        end = sequence.num_computed + num_tokens
        for group in self.groups:
            group.trim(sequence)
        if any(group.missing(sequence, end) > group.pool.available for group in self.groups):
            return False
        for group in self.groups:
            group.reserve(sequence, end)
        sequence.room = min([group.room(sequence) for group in self.groups])
        return True

    @property
    def goes_back(self) -> bool:
        """Whether a sequence can go on before tokens that were computed; a recurrent state cannot be what it was."""
        return not any(isinstance(group, StateSlots) for group in self.groups)

    def waits_for_step(self, sequence: Sequence) -> bool:
        """Whether it may give pages back as soon as it is known how far the steps in flight have got."""
        return sequence.num_computed > sequence.num_certain and not all(group.keeps_all for group in self.groups)

    def fits(self, sequence: Sequence, *, chunk: int) -> bool:
        """Whether an attached sequence can be admitted; see `LayerStates.fits`."""
        return all(group.fits(sequence, chunk=chunk) for group in self.groups)

    @property
    def available(self) -> tuple[int, ...]:
        """Pages that may be given out, by group."""
        return tuple(group.pool.available for group in self.groups)

    @property
    def num_snapshots(self) -> int:
        """Grows when a longer prefix may be known although `longer_prefix` knows the pages for it since long."""
        return sum(group.num_snapshots for group in self.groups)

    def longer_prefix(self, sequence: Sequence, length: int) -> bool:
        """Whether a prefix of more pages is known now than when ``attach_prefix`` found ``length`` of them."""
        if length >= min(self._sharable_pages(sequence), len(sequence.keys)):
            return False
        key = self._key(sequence, length)
        return all(group.find(key) is not None for group in self.groups)

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """The next step computes ``num_tokens`` more; registers the pages that it fills.

        Registering before the step has run is safe: the device runs steps in order. What a page of keys holds may even
        be read in the same step, for it is written first; what may not be, `LayerStates.find` does not find.
        """
        sequence.num_computed += num_tokens
        if len(sequence.tokens) >= (sequence.num_committed + 1) * self.page_size:
            self._commit(sequence, len(sequence.tokens))

    def fall_short(self, sequence: Sequence, num_tokens: int) -> None:
        """A step that has been read brought so many tokens fewer than it might have; it goes on from there."""
        sequence.num_computed -= num_tokens

    def forget(self, sequence: Sequence) -> None:
        """What was computed for the sequence cannot be relied on: nobody finds it from now on."""
        for index in range(sequence.num_committed):
            key = self._key(sequence, index)
            for number, group in enumerate(self.groups):
                group.forget(key)
                if self._offload is not None:
                    self._offload.forget(number, key)
        sequence.num_committed = len(sequence.tokens)  # or giving the pages back would register them again

    def release(self, sequence: Sequence) -> None:
        """Gives every page back."""
        # Tokens may have become known since the last step was planned. What sampled the last one computed the others.
        self._commit(sequence, len(sequence.tokens) - 1)
        for group in self.groups:
            group.release(sequence)
        sequence.num_computed = sequence.num_committed = 0

    def stats(self) -> KVStats:
        return KVStats(
            free=sum(pool.free for pool in self.pools),
            cached=sum(pool.cached for pool in self.pools),
            used=sum(pool.used for pool in self.pools),
            total=sum(pool.total for pool in self.pools),
        )

    def check(self) -> None:
        for pool in self.pools:
            pool.check()

    def reset_prefix_cache(self, *, offloaded: bool = True) -> None:
        """Forgets what the device's pages hold, which are given to others or vanish.

        Args:
            offloaded: what is kept elsewhere is forgotten, too.
        """
        for pool in self.pools:
            pool.forget_all()
        if self._offload is not None:
            self._offload.drop_moves()
            if offloaded:
                self._offload.clear()
        if self._events is not None:
            self._events.cleared()

    def take_events(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """Which pages can be found, or cannot any more, since the last time this was asked."""
        return [] if self._events is None else self._events.take()

    def _key(self, sequence: Sequence, index: int) -> PageKey:
        """Key of the sequence's full page ``index``; those before it must have been asked for."""
        tokens = tuple(sequence.tokens[index * self.page_size : (index + 1) * self.page_size])
        if index < len(sequence.keys):
            return PageKey(sequence.keys[index], tokens)
        key = PageKey.chain(sequence.keys[index - 1] if index else self._root(sequence), tokens)
        sequence.keys.append(key.digest)
        return key

    def _root(self, sequence: Sequence) -> bytes:
        request = sequence.request
        if not self.share_prefixes:
            return PageKey.root("request", str(request.request_id))
        kind = "".join(f"{part} " for part in self._prompt_kind(sequence.num_prompt_tokens))
        return PageKey.root("salt", kind + request.cache_salt) if request.cache_salt else PageKey.root("all", kind)

    def _attach_and_restore(self, sequence: Sequence, offload: Offload, length: int) -> int:
        """Gives a sequence the pages of its longest prefix, of which ``length`` pages need not be restored.

        Returns:
            Pages of the prefix.
        """
        known = self._known_pages(sequence, away=True)
        longest = self._longest_hit(known)
        while longest > length and not self._can_restore(known, longest):
            longest = self._longest_hit([pages[: longest - 1] for pages in known])
        longest = max(longest, length)
        held: list[list[int]] = []
        for group, pages in zip(self.groups, known, strict=True):
            needed = pages[group.first_needed(longest * self.page_size) : longest]
            held.append([page for page in needed if page is not None and page != AWAY])
            for page in held[-1]:
                group.pool.hold(page)  # or it might be given out for what is restored
        came: dict[int, str] = {}  # by index of the page, where it was
        for number, (group, pages) in enumerate(zip(self.groups, known, strict=True)):
            for index in range(group.first_needed(longest * self.page_size), longest):
                if pages[index] != AWAY:
                    continue
                new = group.pool.allocate(1)
                assert new is not None
                key = self._key(sequence, index)
                if group.pool.commit(new[0], key) and self._events is not None:
                    self._tell(self._events, sequence, number, index, key)
                where = offload.restore(number, key, new[0])
                came[index] = where if came.get(index, HOST) == HOST else came[index]
                pages[index] = new[0]
                held[number] += new
            group.attach(sequence, pages[:longest])
            group.pool.release(held[number])
        if sequence.times.scheduled is None:  # else its prompt has been counted
            where, found = HOST, Counter[str]()
            for index in reversed(range(length, longest)):
                where = came.get(index, where)  # of pages that nobody needs, where those behind them were
                found[where] += self.page_size
            offload.count_hits(found)
        return longest

    def _can_restore(self, known: list[list[int | None]], length: int) -> bool:
        """Whether each group has enough pages to give out beside those that are needed."""
        for group, pages in zip(self.groups, known, strict=True):
            needed = pages[group.first_needed(length * self.page_size) : length]
            idle = {page for page in needed if page is not None and page != AWAY and not group.pool.holders(page)}
            if needed.count(AWAY) > group.pool.available - len(idle):
                return False
        return True

    def _find(self, number: int, key: PageKey, *, soon: bool, away: bool, on_disk: bool) -> int | None:
        group, offload = self.groups[number], self._offload
        page = group.find(key, soon=soon)
        if page is not None or offload is None or not (away or on_disk):
            return page
        # What the step under way computes is found when it has run, and need not come back.
        known = group.pool.find(key) is None and offload.find(number, key, on_disk=on_disk)
        return AWAY if known else None

    def _tell(self, events: CacheEvents, sequence: Sequence, number: int, index: int, key: PageKey) -> None:
        """A sequence's page ``index`` can be found in a group."""
        parent = sequence.keys[index - 1] if index else None
        events.stored(number, key, parent=parent, salt=sequence.request.cache_salt)

    def _known_pages(
        self, sequence: Sequence, *, soon: bool = False, away: bool = False, on_disk: bool = False
    ) -> list[list[int | None]]:
        """Per group, the cached page of each full page of the prompt, as far as it can be of use.

        Args:
            soon: as `LayerStates.find` has it.
            away: AWAY for those in host memory.
            on_disk: AWAY for those in host memory and on disk.
        """
        known: list[list[int | None]] = [[] for _ in self.groups]
        for index in range(self._sharable_pages(sequence)):
            key = self._key(sequence, index)
            found = [self._find(number, key, soon=soon, away=away, on_disk=on_disk) for number in range(len(known))]
            if any(group.keeps_all and page is None for group, page in zip(self.groups, found, strict=True)):
                break
            for pages, page in zip(known, found, strict=True):
                pages.append(page)
        return known

    def _sharable_pages(self, sequence: Sequence) -> int:
        """Full pages that may be found instead of computed."""
        if sequence.needs_every_position or sequence.request.params.skip_reading_prefix_cache:
            return 0
        return (len(sequence.tokens) - 1) // self.page_size

    def _longest_hit(self, known: list[list[int | None]]) -> int:
        """Most pages such that each group has every page that the next token needs."""
        # Where all pages are needed, all are known; see `_known_pages`.
        partial = [(g, pages) for g, pages in zip(self.groups, known, strict=True) if not g.keeps_all]
        for length in range(len(known[0]), 0, -1):
            if all(None not in pages[g.first_needed(length * self.page_size) : length] for g, pages in partial):
                return length
        return 0

    def _commit(self, sequence: Sequence, known: int) -> None:
        """Registers the full pages among the first ``known`` tokens."""
        full = min(sequence.num_computed, known) // self.page_size
        for index in range(sequence.num_committed, full):
            key = self._key(sequence, index)
            for number, group in enumerate(self.groups):
                if group.commit(sequence, index, key) and self._events is not None:
                    self._tell(self._events, sequence, number, index, key)
        sequence.num_committed = max(sequence.num_committed, full)
