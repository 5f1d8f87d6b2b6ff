"""The KV cache: the pages of all groups of layers for every sequence; prefix reuse, growth, release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from llmjax.engine.core.layer_states import GroupSpec, LayerStates, StateSlots, TableChanges, kind_of
from llmjax.engine.core.listener import CacheListener, NoListener
from llmjax.engine.core.page_pool import PageKey, PagePool, PoolWatcher
from llmjax.engine.core.prefix import FETCHED, NOW, RESTORED, SOON, Found, PageKeys, Prefix
from llmjax.engine.core.request import Sequence
from llmjax.engine.core.stats import KVStats
from llmjax.engine.core.tier import Contents, Giver, NoTier, PageDevice, Place, Tier


class KVCache:
    """The pages of all sequences.

    Args:
        specs: the groups of layers, one per distinct span.
        page_size: tokens per page.
        num_slots: sequences that may run at once.
        pages_per_sequence: width of a page table.
        share_prefixes: whether different requests may share pages (continuations of one request always do).
        prompt_kind: maps a prompt's length to its kind; prompts of different kinds share no pages.
        tier: keeps evicted pages below the device, and restores them.
        listener: is told which pages can be found.
        giver: gives pages to other servers; None: they get none.
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
        tier: Tier | None = None,
        listener: CacheListener | None = None,
        giver: Giver | None = None,
    ) -> None:
        self.page_size = page_size
        self.keys = PageKeys(page_size=page_size, shared=share_prefixes, prompt_kind=prompt_kind)
        self.groups: list[LayerStates] = [
            kind_of(spec.span)(spec, page_size=page_size, num_slots=num_slots, pages_per_sequence=pages_per_sequence)
            for spec in specs
        ]
        self.tier = tier or NoTier()
        self.listener = listener or NoListener()
        self._giver = giver
        for number, pool in enumerate(self.pools):
            pool.watcher = _PoolWatcher(number, self.tier, self.listener)

    @property
    def pools(self) -> list[PagePool]:
        """The pool of each group."""
        return [group.pool for group in self.groups]

    def take_changes(self) -> TableChanges:
        """What has changed in the tables [G, num_slots, pages_per_sequence] since the last call."""
        return TableChanges.of(self.groups)

    def begin_plan(self) -> None:
        """Notes that a new step is being planned, which may read what earlier steps write."""
        for group in self.groups:
            group.begin_plan()
        self.tier.begin_plan()

    # The prefix of a sequence

    def attach_prefix(self, sequence: Sequence) -> int | None:
        """Gives a sequence the cached pages of its longest known prefix.

        At least one token is left to compute, because its logits are needed.

        Returns:
            Tokens covered by the attached pages. None, and nothing is attached, if the step being planned computes
            more of the prefix for another sequence, so that it is better to wait for the next plan.
        """
        sequence.num_committed = sequence.num_computed = sequence.room = 0
        prefix = self._search(sequence)
        here = prefix.longest(NOW)
        if prefix.longest(SOON) > here:
            return None
        length = next((n for n in prefix.lengths(RESTORED) if n == here or self._can_restore(prefix, n)), 0)
        restored = self._attach(sequence, prefix, length)
        self.tier.end_fetch(sequence)
        if sequence.times.scheduled is None:  # otherwise its prompt has already been counted
            self._count_hits(restored, range(here, length))
        sequence.num_committed = length
        sequence.num_computed = length * self.page_size
        return sequence.num_computed

    def longer_prefix(self, sequence: Sequence, length: int) -> bool:
        """Whether a prefix of more pages is known now than when ``attach_prefix`` found ``length`` of them."""
        if length >= min(self.keys.num_sharable(sequence), len(sequence.keys)):
            return False
        key = self.keys.of(sequence, length)
        return all(self._is_here(group, key) for group in self.groups)

    @property
    def num_snapshots(self) -> int:
        """Grows with each snapshot of a state, which may make a prefix longer without `longer_prefix` seeing it."""
        return sum(group.num_snapshots for group in self.groups)

    def _search(self, sequence: Sequence) -> Prefix:
        """Where each full page of the prompt is, as far as it can be of use."""
        pages: list[list[Found | None]] = [[] for _ in self.groups]
        for index in range(self.keys.num_sharable(sequence)):
            key = self.keys.of(sequence, index)
            found = [self._find(number, key) for number in range(len(pages))]
            if any(group.keeps_all and page is None for group, page in zip(self.groups, found, strict=True)):
                break
            for of_group, page in zip(pages, found, strict=True):
                of_group.append(page)
        return Prefix(self.groups, pages, sequence.request.media)

    def _find(self, number: int, key: PageKey) -> Found | None:
        group = self.groups[number]
        if (page := group.pool.find(key)) is not None:
            return Found(Place.DEVICE if group.readable(page) else Place.NEXT_STEP, page)
        place = self.tier.find(number, key)
        return None if place is None else Found(place)

    def _is_here(self, group: LayerStates, key: PageKey) -> bool:
        page = group.pool.find(key)
        return page is not None and group.readable(page)

    def _can_restore(self, prefix: Prefix, length: int) -> bool:
        """Whether each group has enough free pages, not counting those of the prefix that are on the device."""
        for group, pages in zip(self.groups, prefix.pages, strict=True):
            needed = [found for found in pages[group.first_needed(length * self.page_size) : length] if found]
            idle = {page for place, page in needed if place is Place.DEVICE and not group.pool.holders(page)}
            if sum(place is Place.HOST for place, _ in needed) > group.pool.available - len(idle):
                return False
        return True

    def _attach(self, sequence: Sequence, prefix: Prefix, length: int) -> dict[int, Place]:
        """Gives a sequence the first ``length`` pages; those in host memory are restored.

        Returns:
            Where restored pages were, by index; the farthest place, if it differs between groups.
        """
        restored: dict[int, Place] = {}
        for number, (group, found) in enumerate(zip(self.groups, prefix.pages, strict=True)):
            pages: list[int | None] = [None if one is None or one.place is Place.HOST else one.page for one in found]
            needed = range(group.first_needed(length * self.page_size), length)
            absent = [index for index in needed if pages[index] is None]
            held = [page for index in needed if absent and (page := pages[index]) is not None]
            for page in held:
                group.pool.hold(page)  # otherwise a restored page might get it
            for index in absent:
                place, page = self._restore(sequence, number, index)
                pages[index] = page
                held.append(page)
                restored[index] = max(place, restored.get(index, place))
            group.attach(sequence, pages[:length])
            group.pool.release(held)
        return restored

    def _restore(self, sequence: Sequence, number: int, index: int) -> tuple[Place, int]:
        """Has the sequence's page ``index`` restored for a group; returns where it was, and its page on the device."""
        pool, key = self.groups[number].pool, self.keys.of(sequence, index)
        new = pool.allocate(1)
        assert new is not None
        if pool.commit(new[0], key):
            self._tell(sequence, number, index, key)
        return self.tier.restore(number, key, new[0]), new[0]

    def _count_hits(self, restored: dict[int, Place], indices: range) -> None:
        """Counts prompt tokens of pages that were not on the device; a page that no group needs counts as the next."""
        place, tokens = Place.HOST, Counter[Place]()
        for index in reversed(indices):
            place = restored.get(index, place)
            tokens[place] += self.page_size
        self.tier.count_hits(tokens)

    # Pages that are not on the device

    def fetch(self, sequence: Sequence) -> bool:
        """Whether to wait, until `Tier.fetched`, for pages of a sequence's prefix from disk or from another server."""
        transfer = None if sequence.index else sequence.request.params.kv_transfer
        if not self.keys.shared or not self.tier.can_fetch(transfer):
            return False
        most = self.tier.most_fetched
        length = self._search(sequence).longest(FETCHED, most=most)
        there = min(self.keys.num_sharable(sequence), most) if self.tier.takes(transfer) else 0
        if there > length:
            length = there  # all pages that are not here: the other server has what the next token needs
        else:
            transfer = None
        names = []
        for number, group in enumerate(self.groups):
            for index in range(group.first_needed(length * self.page_size), length):
                if not self._is_here(group, key := self.keys.of(sequence, index)):
                    names.append((number, key.digest))
        return self.tier.fetch(sequence, names, transfer)

    def give(self, sequence: Sequence, device: PageDevice) -> None:
        """Starts to read out the pages of a computed prompt for another server, if its request says so."""
        transfer = sequence.request.params.kv_transfer
        if self._giver is None or transfer is None or transfer.give is None or sequence.index:
            return
        prefix, parts = self._search(sequence), list[tuple[int, list[PageKey], Contents]]()
        length = prefix.longest(SOON, most=(sequence.num_prompt_tokens - 1) // self.page_size)
        for number, (group, pages) in enumerate(zip(self.groups, prefix.pages, strict=True)):
            first = group.first_needed(length * self.page_size)
            keys = [self.keys.of(sequence, index) for index in range(first, length)]
            needed = [found.page for found in pages[first:length] if found is not None]
            if keys:
                parts.append((number, keys, device.read_pages(number, needed)))
        self._giver.give(transfer.give, parts)

    def keep(self, device: PageDevice) -> None:
        """Keeps on disk the pages that later starts may find."""
        self.tier.keep(device, self.pools)

    def close(self) -> None:
        """Closes the listener and the giver."""
        self.listener.close()
        if self._giver is not None:
            self._giver.close()

    # Growth and release

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
        """Whether a sequence can be rewound to before tokens that were computed; a recurrent state cannot."""
        return not any(isinstance(group, StateSlots) for group in self.groups)

    def waits_for_step(self, sequence: Sequence) -> bool:
        """Whether a sequence may free pages once it is known how far the steps in flight have got."""
        return sequence.num_computed > sequence.num_certain and not all(group.keeps_all for group in self.groups)

    def fits(self, sequence: Sequence, *, chunk: int) -> bool:
        """Whether an attached sequence can be admitted; see `LayerStates.fits`."""
        return all(group.fits(sequence, chunk=chunk) for group in self.groups)

    @property
    def available(self) -> tuple[int, ...]:
        """Pages that may be given out, by group."""
        return tuple(group.pool.available for group in self.groups)

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """Registers the pages that the next step fills by computing ``num_tokens`` more tokens.

        Registering before the step has run is safe: the device runs steps in order. A page of KV entries may even be
        read in the same step, which writes them first; what may not be is not `LayerStates.readable`.
        """
        sequence.num_computed += num_tokens
        if len(sequence.tokens) >= (sequence.num_committed + 1) * self.page_size:
            self._commit(sequence, len(sequence.tokens))

    def fall_short(self, sequence: Sequence, num_tokens: int) -> None:
        """Notes that a step has sampled ``num_tokens`` fewer tokens than it might have."""
        sequence.num_computed -= num_tokens

    def forget(self, sequence: Sequence) -> None:
        """Removes what was computed for a sequence from the prefix cache, because it cannot be relied on."""
        for index in range(sequence.num_committed):
            key = self.keys.of(sequence, index)
            for number, group in enumerate(self.groups):
                group.forget(key)
                self.tier.forget(number, key)
        sequence.num_committed = len(sequence.tokens)  # otherwise freeing the pages would register them again

    def release(self, sequence: Sequence) -> None:
        """Gives every page back."""
        # Tokens may have become known since the last step was planned. What sampled the last one computed the others.
        self._commit(sequence, len(sequence.tokens) - 1)
        for group in self.groups:
            group.release(sequence)
        sequence.num_computed = sequence.num_committed = 0

    def reset_prefix_cache(self, *, offloaded: bool = True) -> None:
        """Empties the prefix cache of the device.

        Args:
            offloaded: whether pages that are kept elsewhere are forgotten, too.
        """
        for pool in self.pools:
            pool.forget_all()
        self.tier.reset(everything=offloaded)
        self.listener.cleared()

    def stats(self) -> KVStats:
        return KVStats(
            free=sum(pool.free for pool in self.pools),
            cached=sum(pool.cached for pool in self.pools),
            used=sum(pool.used for pool in self.pools),
            total=sum(pool.total for pool in self.pools),
        )

    def check(self) -> None:
        """Raises LLMJaxError if a page is lost or counted twice."""
        for pool in self.pools:
            pool.check()

    def _commit(self, sequence: Sequence, known: int) -> None:
        """Registers the full pages among the first ``known`` tokens."""
        full = min(sequence.num_computed, known) // self.page_size
        for index in range(sequence.num_committed, full):
            key = self.keys.of(sequence, index)
            for number, group in enumerate(self.groups):
                if group.commit(sequence, index, key):
                    self._tell(sequence, number, index, key)
        sequence.num_committed = max(sequence.num_committed, full)

    def _tell(self, sequence: Sequence, number: int, index: int, key: PageKey) -> None:
        """Tells the listener that a sequence's page ``index`` can be found in a group."""
        parent = sequence.keys[index - 1] if index else None
        self.listener.stored(number, key, parent=parent, request=sequence.request)


class _PoolWatcher(PoolWatcher):
    """Tells the tier and the listener which pages a group's pool forgets."""

    def __init__(self, group: int, tier: Tier, listener: CacheListener) -> None:
        self._group = group
        self._tier = tier
        self._listener = listener

    def evicted(self, page: int, key: PageKey) -> None:
        self._tier.evicted(self._group, page, key)
        self._listener.removed(self._group, key)

    def forgotten(self, key: PageKey) -> None:
        self._listener.removed(self._group, key)
