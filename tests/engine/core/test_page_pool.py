"""The page pool against a model that keeps everything in plain dictionaries."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmjax.engine.core.page_pool import DUMMY_PAGE, PageKey, PagePool
from llmjax.errors import LLMJaxError

pytestmark = pytest.mark.smoke

NUM_PAGES = 7
KEYS = [PageKey.chain(b"", (token, token + 1)) for token in range(5)]


class PoolMachine(RuleBasedStateMachine):
    """Applies every operation to the pool and to a naive model of it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.holders = dict.fromkeys(range(1, NUM_PAGES), 0)
        self.content: dict[int, PageKey] = {}
        self.released: list[int] = []  # pages that became cached, oldest first

    @property
    def held(self) -> list[int]:
        return [page for page, count in self.holders.items() if count]

    @rule(count=st.integers(0, NUM_PAGES + 1))
    def allocate(self, count: int) -> None:
        free = [page for page, holders in self.holders.items() if not holders and page not in self.content]
        pages = self.pool.allocate(count)
        if count > len(free) + len(self.released):
            assert pages is None
            return
        assert pages is not None
        assert len(set(pages)) == count
        assert DUMMY_PAGE not in pages
        evicted = self.released[: max(0, count - len(free))]
        assert set(pages) - set(free) == set(evicted)  # cached pages only when nothing is free, oldest first
        for page in pages:
            assert self.holders[page] == 0
            self.holders[page] = 1
        for page in evicted:
            self.released.remove(page)
            del self.content[page]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.held), unique=True))
        self.pool.release([DUMMY_PAGE, *pages])
        for page in pages:
            self.holders[page] -= 1
            if not self.holders[page] and page in self.content:
                self.released.append(page)

    @rule(key=st.sampled_from(KEYS))
    def hold_what_is_found(self, key: PageKey) -> None:
        known = [page for page, content in self.content.items() if content == key]
        page = self.pool.find(key)
        assert [page] == known or (page is None and not known)
        if page is not None:
            self.pool.hold(page)
            if not self.holders[page]:
                self.released.remove(page)
            self.holders[page] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def commit(self, data: st.DataObject, key: PageKey) -> None:
        page = data.draw(st.sampled_from(self.held))
        self.pool.commit(page, key)
        if page not in self.content and key not in self.content.values():
            self.content[page] = key

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.content.clear()
        self.released.clear()

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert self.pool.used == len(self.held)
        assert self.pool.cached == len(self.released)
        assert self.pool.free + self.pool.cached + self.pool.used == self.pool.total == NUM_PAGES - 1
        assert self.pool.available == self.pool.free + self.pool.cached
        for key in KEYS:
            expected = [page for page, content in self.content.items() if content == key]
            assert [p for p in [self.pool.find(key)] if p is not None] == expected


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPool = PoolMachine.TestCase


def test_key_depends_on_everything_before() -> None:
    first = PageKey.chain(b"", (1, 2))
    assert PageKey.chain(b"", (1, 2)) == first
    assert PageKey.chain(first.digest, (3, 4)) != PageKey.chain(b"", (3, 4))
    assert PageKey.chain(b"", (1, 2)).digest != PageKey.chain(b"", (2, 1)).digest
    assert PageKey.chain(b"", (258,)).digest != PageKey.chain(b"", (2, 1)).digest


def test_equal_digests_of_other_tokens_are_no_hit() -> None:
    pool = PagePool(3)
    pages = pool.allocate(1)
    assert pages is not None
    pool.commit(pages[0], PageKey(b"same", (1, 2)))
    assert pool.find(PageKey(b"same", (3, 4))) is None


def test_releasing_more_than_held_is_an_error() -> None:
    pool = PagePool(3)
    pages = pool.allocate(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(LLMJaxError, match=f"page {pages[0]} was released more often than held"):
        pool.release(pages)


def test_too_few_pages_are_refused() -> None:
    with pytest.raises(LLMJaxError, match="at least 2 pages, not 1"):
        PagePool(1)


def test_roots_and_pages_never_have_the_same_digest() -> None:
    """The bytes of a salt may be anything a client likes, even those of another salt followed by tokens."""
    page = (97, 98)
    tokens = b"".join(token.to_bytes(4, "little") for token in page)
    assert PageKey.root("salt", tokens.decode()) != PageKey.chain(b"", page).digest
    assert PageKey.root("salt", "x") != PageKey.root("request", "x") != PageKey.root("all")
    assert PageKey.root("salt", "\ud800") != PageKey.root("salt", "?")
    digests = {PageKey.root(kind, name) for kind in ("salt", "request") for name in ("", "x", "salt:x", "request:x")}
    digests |= {PageKey.chain(root, page).digest for root in digests}
    assert len(digests) == 16
    assert {len(digest) for digest in digests} == {16}
