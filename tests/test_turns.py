"""Clients take turns: whoever asks for little is served soon, however much others ask for."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from llmjax.errors import QueueFull
from llmjax.turns import Turn, TurnLimits, Turns

SECONDS = 60.0  # a test that waits longer has failed


class Gates:
    """Work that goes on when it is told to, and what has begun, in order."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._gates: dict[str, threading.Event] = {}
        self._begun = {}
        self.order: list[str] = []

    def submit(self, client: str, name: str, *, long: bool = False) -> Future[str]:
        gate, begun = threading.Event(), threading.Event()
        self._gates[name], self._begun[name] = gate, begun

        def work(turn: Turn) -> str:
            self.order.append(name)
            if long:
                try:
                    turn.takes_long()
                finally:
                    begun.set()
            begun.set()
            assert gate.wait(SECONDS)
            return name

        return self._turns.submit(client, work)

    def wait_begun(self, *names: str) -> None:
        for name in names:
            assert self._begun[name].wait(SECONDS), name

    def open(self, *names: str) -> None:
        for name in names:
            self._gates[name].set()


@pytest.fixture
def gates() -> Any:
    found: list[Gates] = []

    def make(**limits: int) -> Gates:
        found.append(Gates(Turns("pieces of work", limits=TurnLimits(**limits))))
        return found[-1]

    yield make
    for each in found:
        each.open(*each._gates)


def test_clients_take_turns(gates: Any) -> None:
    work = gates(short=1)
    first = work.submit("a", "a0")
    work.wait_begun("a0")
    rest = [work.submit("a", f"a{i}") for i in range(1, 4)] + [work.submit("b", "b0"), work.submit("c", "c0")]
    work.open(*work._gates)
    assert [future.result(SECONDS) for future in (first, *rest)] == ["a0", "a1", "a2", "a3", "b0", "c0"]
    assert work.order == ["a0", "a1", "b0", "c0", "a2", "a3"]


def test_what_takes_long_makes_room(gates: Any) -> None:
    work = gates(short=1, long=2, long_each=1, postponed=0)
    slow = work.submit("a", "slow", long=True)
    work.wait_begun("slow")
    second = work.submit("a", "second", long=True)
    with pytest.raises(QueueFull):  # of one client
        second.result(SECONDS)
    other = work.submit("b", "other", long=True)
    work.wait_begun("other")
    third = work.submit("c", "third", long=True)
    with pytest.raises(QueueFull):  # of all
        third.result(SECONDS)
    quick = work.submit("a", "quick")
    work.open("quick")
    assert quick.result(SECONDS) == "quick" and not slow.done() and not other.done()
    work.open("slow", "other")
    assert slow.result(SECONDS) == "slow" and other.result(SECONDS) == "other"
    again = work.submit("a", "again", long=True)  # those have gone
    work.wait_begun("again")
    work.open("again")
    assert again.result(SECONDS) == "again"


def test_what_has_no_place_begins_again_when_there_is_one(gates: Any) -> None:
    """Work that was postponed begins in each client's order, clients in turn; beyond the bounds it is refused."""
    work = gates(short=1, long=1, postponed=3, postponed_each=2)
    futures = {"a0": work.submit("a", "a0", long=True)}
    work.wait_begun("a0")
    for name in ("a1", "a2", "a3", "b0", "c0"):
        futures[name] = work.submit(name[0], name, long=True)
        work.wait_begun(name)
        if name in ("a3", "c0"):
            with pytest.raises(QueueFull):
                futures[name].result(SECONDS)
    quick = work.submit("b", "quick")
    work.open("quick")
    assert quick.result(SECONDS) == "quick" and not any(futures[name].done() for name in ("a0", "a1", "a2", "b0"))
    del work.order[:]
    work.open("a0", "a1", "a2", "b0")
    assert [futures[name].result(SECONDS) for name in ("a0", "a1", "a2", "b0")] == ["a0", "a1", "a2", "b0"]
    assert work.order == ["a1", "b0", "a2"]


def test_what_waits_is_bounded(gates: Any) -> None:
    work = gates(short=1, waiting=3, waiting_each=2)
    work.submit("a", "a0")
    work.wait_begun("a0")
    work.submit("a", "a1")
    work.submit("a", "a2")
    with pytest.raises(QueueFull) as full:
        work.submit("a", "a3")
    assert full.value.retry_after == 1.0
    last = work.submit("b", "b0")
    with pytest.raises(QueueFull):
        work.submit("c", "c0")
    work.open("a0", "a1", "a2", "b0")
    assert last.result(SECONDS) == "b0"


def test_what_nobody_waits_for_is_not_begun(gates: Any) -> None:
    work = gates(short=1)
    first = work.submit("a", "a0")
    work.wait_begun("a0")
    left, last = work.submit("a", "a1"), work.submit("a", "a2")
    assert left.cancel()
    work.open("a0", "a2")
    assert (first.result(SECONDS), last.result(SECONDS)) == ("a0", "a2") and work.order == ["a0", "a2"]


def test_failures_are_those_of_one_piece(gates: Any) -> None:
    turns = Turns("pieces of work", limits=TurnLimits(short=1))

    def failing(turn: Turn) -> None:
        raise KeyError("wat")

    with pytest.raises(KeyError, match="wat"):
        turns.submit("a", failing).result(SECONDS)
    assert turns.submit("a", lambda _: 7).result(SECONDS) == 7
