"""A server's collector does not go through what was built at start, wherever the engine runs."""

from __future__ import annotations

import gc
import weakref

import pytest

from llmjax.collector import paused, permanent


class Node:
    """In a cycle with itself."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_permanent_is_not_searched_and_the_rest_still_is() -> None:
    try:
        with permanent():
            assert not gc.isenabled()
            kept = weakref.ref(Node())
        assert gc.isenabled()
        lost = weakref.ref(Node())
        gc.collect()
        assert kept() is not None and lost() is None
    finally:
        gc.unfreeze()
    gc.collect()
    assert kept() is None


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    try:
        with pytest.raises(ImportError), permanent():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_a_pause_ends_with_the_outermost() -> None:
    assert gc.isenabled()
    with paused():
        with paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
