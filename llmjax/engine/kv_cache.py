"""Which page holds which token of which sequence, over all KV groups: prefix reuse, growth, windows, release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from llmjax.engine.page_pool import DUMMY_PAGE, PageKey, PagePool
from llmjax.engine.request import Sequence


@dataclass(frozen=True)
class GroupSpec:
    """Layers that keep the same tokens: all (``window`` None) or the last ``window``."""

    window: int | None
    num_pages: int  # the dummy page included


@dataclass(frozen=True)
class KVStats:
    """Pages by state, summed over groups; ``free + cached + used == total``."""

    free: int
    cached: int
    used: int
    total: int

    @property
    def usage(self) -> float:
        return self.used / self.total


class KVCache:
    """Page tables of all sequences and the pools behind them.

    Args:
        groups: one per distinct attention window, full attention first.
        page_size: tokens a page.
        num_slots: sequences that may run at once.
        pages_per_sequence: width of a page table.
        share_prefixes: whether different requests may share pages (continuations of one request always do).
        prompt_kind: of a prompt's length; prompts of different kinds have different keys for the same tokens.
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        *,
        page_size: int,
        num_slots: int,
        pages_per_sequence: int,
        share_prefixes: bool = True,
        prompt_kind: Callable[[int], tuple[int, ...]] = lambda prompt_len: (),
    ) -> None:
        self.groups = groups
        self.page_size = page_size
        self.share_prefixes = share_prefixes
        self._prompt_kind = prompt_kind
        self.pools = [PagePool(group.num_pages) for group in groups]
        # What the device reads, row by slot; kept up to date here so that packing a step is one gather.
        self.tables = [np.zeros((num_slots, pages_per_sequence), np.int32) for _ in groups]

    def attach_prefix(self, sequence: Sequence) -> int:
        """Gives a sequence the cached pages of its longest known prefix.

        At least one token is left to compute, because its logits are needed.

        Returns:
            Tokens covered by the attached pages.
        """
        sequence.pages = [[] for _ in self.groups]
        sequence.num_committed = sequence.num_computed = 0
        known = self._known_pages(sequence)
        length = self._longest_hit(known)
        for group, pool in enumerate(self.pools):
            first = self._first_needed(group, length * self.page_size)
            found = [page for page in known[group][first:length] if page is not None]
            for page in found:
                pool.hold(page)
            attached = [DUMMY_PAGE] * min(first, length) + found
            sequence.pages[group] = attached
            self.tables[group][sequence.slot, : len(attached)] = attached
        sequence.num_committed = length
        sequence.num_computed = length * self.page_size
        return sequence.num_computed

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room for the next ``num_tokens`` tokens in every group, or changes nothing and returns False."""
        self._trim(sequence)
        end = -(-(sequence.num_computed + num_tokens) // self.page_size)  # pages
        missing = [max(0, end - len(pages)) for pages in sequence.pages]
        if any(count > pool.available for count, pool in zip(missing, self.pools, strict=True)):
            return False
        for group, (count, pool) in enumerate(zip(missing, self.pools, strict=True)):
            if count:
                new = pool.allocate(count)
                assert new is not None
                held = sequence.pages[group]
                self.tables[group][sequence.slot, len(held) : len(held) + count] = new
                held.extend(new)
        return True

    def fits(self, sequence: Sequence, *, chunk: int) -> bool:
        """Whether all tokens the sequence has now would find pages, so that admitting it does not lead to a preemption
        at once.

        Args:
            chunk: tokens that a step computes of it at most; pages behind a window go back between steps.
        """
        end = -(-sequence.num_tokens // self.page_size)
        for pages, spec, pool in zip(sequence.pages, self.groups, self.pools, strict=True):
            missing = end - len(pages)
            if spec.window is not None:
                # What a step's first token sees and its own tokens, less what the window will leave behind. A page that
                # others hold too does not come back.
                most = -(-(spec.window + chunk - 2) // self.page_size) + 1
                missing = min(missing, most - sum(pool.holders(page) == 1 for page in pages))
            if missing > pool.available:
                return False
        return True

    @property
    def available(self) -> tuple[int, ...]:
        """Pages that may be given out, by group."""
        return tuple(pool.available for pool in self.pools)

    def longer_prefix(self, sequence: Sequence, length: int) -> bool:
        """Whether a prefix of more pages is known now than when ``attach_prefix`` found ``length`` of them."""
        if length >= min(self._sharable_pages(sequence), len(sequence.keys)):
            return False
        key = self._key(sequence, length)
        return all(pool.find(key) is not None for pool in self.pools)

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """The next step computes ``num_tokens`` more; registers the pages that it fills.

        Registering before the step has run is safe: who finds the page reads it in the same step or later, and
        the device runs steps in order and writes before it reads.
        """
        sequence.num_computed += num_tokens
        self._commit(sequence, len(sequence.tokens))

    def forget(self, sequence: Sequence) -> None:
        """What the sequence's pages hold cannot be relied on: nobody finds them from now on."""
        for pages, pool in zip(sequence.pages, self.pools, strict=True):
            pool.forget(pages)
        sequence.num_committed = len(sequence.tokens)  # or giving the pages back would register them again

    def release(self, sequence: Sequence) -> None:
        """Gives every page back. Later pages go first, so that they are evicted before the prefix they continue."""
        # Tokens may have become known since the last step was planned. What sampled the last one computed the others.
        self._commit(sequence, len(sequence.tokens) - 1)
        for group, pool in enumerate(self.pools):
            pool.release(reversed(sequence.pages[group]))
            self.tables[group][sequence.slot, : len(sequence.pages[group])] = DUMMY_PAGE
        sequence.pages = []
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

    def reset_prefix_cache(self) -> None:
        for pool in self.pools:
            pool.forget_all()

    def _first_needed(self, group: int, num_computed: int) -> int:
        """Index of the first page that the query at position ``num_computed`` still sees."""
        window = self.groups[group].window
        return 0 if window is None else max(0, num_computed - window + 1) // self.page_size

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

    def _known_pages(self, sequence: Sequence) -> list[list[int | None]]:
        """Per group, the cached page of each full page of the prompt, as far as the first group knows it."""
        known: list[list[int | None]] = [[] for _ in self.groups]
        for index in range(self._sharable_pages(sequence)):
            key = self._key(sequence, index)
            found = [pool.find(key) for pool in self.pools]
            if self.groups[0].window is None and found[0] is None:
                break
            for pages, page in zip(known, found, strict=True):
                pages.append(page)
        return known

    def _sharable_pages(self, sequence: Sequence) -> int:
        """Full pages that may be found instead of computed."""
        if sequence.wants_prompt_logprobs:
            return 0  # every prompt position must run through the model
        return (len(sequence.tokens) - 1) // self.page_size

    def _longest_hit(self, known: list[list[int | None]]) -> int:
        """Most pages such that each group has every page that the next token sees."""
        for length in range(len(known[0]), 0, -1):
            if all(
                None not in known[group][self._first_needed(group, length * self.page_size) : length]
                for group in range(len(self.groups))
            ):
                return length
        return 0

    def _trim(self, sequence: Sequence) -> None:
        """Frees pages behind the windows. A step in flight may still read them: later writers run after it."""
        for group, pool in enumerate(self.pools):
            pages = sequence.pages[group]
            last = min(self._first_needed(group, sequence.num_computed), len(pages)) - 1
            while last >= 0 and pages[last] != DUMMY_PAGE:
                pool.release([pages[last]])
                pages[last] = self.tables[group][sequence.slot, last] = DUMMY_PAGE
                last -= 1

    def _commit(self, sequence: Sequence, known: int) -> None:
        """Registers the full pages among the first ``known`` tokens."""
        full = min(sequence.num_computed, known) // self.page_size
        for index in range(sequence.num_committed, full):
            key = self._key(sequence, index)
            for group, pool in enumerate(self.pools):
                page = sequence.pages[group][index]
                if page != DUMMY_PAGE:
                    pool.commit(page, key)
        sequence.num_committed = max(sequence.num_committed, full)
