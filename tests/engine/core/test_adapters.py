"""Slots for adapters: which adapter gets one, and no sequence waits forever."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmjax.adapters.reference import Adaptation
from llmjax.engine.core.adapters import AdapterSlots
from llmjax.engine.core.media import EncoderAdapter
from llmjax.errors import CheckpointError, InvalidRequest
from tests.engine.core.test_scheduler import (
    ALL,
    Arrival,
    Shape,
    SimulatedEngine,
    adaptation,
    check_idle,
    check_results,
    prompt_of,
    request,
    run,
)

pytestmark = pytest.mark.smoke

A, B, C = adaptation("a"), adaptation("b"), adaptation("c")


@dataclass
class Loader:
    """A device that only writes down what it gets."""

    there: bool = True
    unreadable: str = ""
    seeing: str = ""  # digests of those that change the encoder of images
    loads: list[tuple[int, str]] = field(default_factory=list)

    def can_load(self, adaptation: Adaptation, *, seconds: float = 0.0) -> bool:
        if adaptation.digest == self.unreadable:
            raise CheckpointError(f"{adaptation.name} has changed")
        return self.there

    def of_encoder(self, adaptation: Adaptation) -> EncoderAdapter | None:
        return EncoderAdapter(adaptation.digest, []) if adaptation.digest in self.seeing else None

    def load_adapter(self, slot: int, adaptation: Adaptation) -> None:
        self.loads.append((slot, adaptation.digest))


def slots(count: int, loader: Loader | None = None) -> AdapterSlots:
    return AdapterSlots(count, loader or Loader())


def test_an_adapter_gets_a_slot_and_keeps_it_for_the_next_request() -> None:
    loader = Loader()
    made = slots(2, loader)
    assert made.take(A, [A]) == 1 and made.take(B, [B]) == 2 and loader.loads == []
    made.dispatch([1, 2])
    assert loader.loads == [(1, "a"), (2, "b")]
    made.ended()
    made.release(1)
    assert made.take(A, [A]) == 1
    made.dispatch([1])
    assert len(loader.loads) == 2


def test_the_adapter_that_was_not_used_for_longest_makes_room() -> None:
    made = slots(2)
    for one in (A, B, A):
        made.release(made.take(one, [one]))
    assert made.take(C, [C]) == 2
    assert made.loaded == {"a": 1, "c": 2}


def test_a_slot_is_kept_until_the_last_dispatch_that_used_it_has_ended() -> None:
    made = slots(1)
    made.take(A, [A])
    made.dispatch([1])
    made.dispatch([1, 0])
    made.release(1)
    assert made.passing([B]) == set()
    made.ended()
    assert made.passing([B]) == set()
    made.dispatch([0])  # one without adapters does not keep it
    made.ended()
    assert made.passing([B]) == {"b"}


def test_a_slot_is_reserved_for_the_first_that_waits() -> None:
    made = slots(1)
    made.take(A, [A])
    assert made.passing([A, B]) == {"a"}  # in the order of arrival
    assert made.passing([B, A]) == set()
    made.release(1)
    assert made.passing([B, A]) == {"b"}


def test_what_cannot_be_read_is_reported_once_and_reserves_nothing() -> None:
    made = slots(1, Loader(unreadable="b"))
    assert made.passing([B, A]) == {"a"}
    assert {digest: str(error) for digest, error in made.take_failed().items()} == {"b": "b has changed"}
    assert made.take_failed() == {}


def test_what_is_being_read_keeps_its_slot_and_is_waited_for() -> None:
    loader = Loader(there=False)
    made = slots(1, loader)
    assert made.passing([B, A]) == set() and made.wait(0)
    loader.there = True
    assert made.passing([B, A]) == {"b"} and not made.wait(0)


def test_after_sleep_all_slots_are_loaded_again() -> None:
    loader = Loader()
    made = slots(1, loader)
    for _ in range(2):
        made.release(made.take(A, [A]))
        made.dispatch([1])
        made.ended()
        made.forget()
    assert loader.loads == [(1, "a"), (1, "a")]


class Slots(RuleBasedStateMachine):
    """Sequences come, run for some dispatches and end, in any order; the oldest one that waits always gets on."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 2
        self.loader = Loader()
        self.slots = slots(self.count, self.loader)
        self.waiting: list[Adaptation] = []
        self.running: list[tuple[Adaptation, int]] = []
        self.content: dict[int, str] = {}
        self.in_flight: list[set[int]] = []

    @rule(one=st.sampled_from([A, B, C, adaptation("a", "b"), adaptation("a", scale=0.5)]))
    def come(self, one: Adaptation) -> None:
        self.waiting.append(one)

    @precondition(lambda self: self.waiting)
    @rule()
    def admit(self) -> None:
        heads = list({one.digest: one for one in reversed(self.waiting)}.values())
        heads.sort(key=self.waiting.index)
        passing = self.slots.passing(heads)
        assert len(passing) <= self.count
        head = next((one for one in heads if one.digest in passing), None)
        if head is None:
            assert self.running or self.in_flight, "nothing runs, and nobody may"
            return
        number = self.slots.take(head, heads)
        if self.content.get(number) != head.digest:
            assert not any(number in used for used in self.in_flight)
            assert number not in {slot for _, slot in self.running}
            self.content[number] = head.digest
        self.waiting.remove(head)
        self.running.append((head, number))

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def dispatch(self) -> None:
        used = {slot for _, slot in self.running}
        self.slots.dispatch(used)
        self.in_flight.append(used)
        assert dict(self.loader.loads) == self.content

    @precondition(lambda self: self.in_flight)
    @rule()
    def read(self) -> None:
        self.slots.ended()
        self.in_flight.pop(0)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, slot = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.slots.release(slot)

    @invariant()
    def counts(self) -> None:
        held = Counter(one.digest for one, _ in self.running)
        assert all(self.slots.holders(digest) == held[digest] for digest in self.slots.loaded)
        assert set(held) <= set(self.slots.loaded)

    def teardown(self) -> None:
        """Waiting sequences are admitted, the oldest first, as soon as the running ones have ended."""
        while self.waiting:
            while self.running:
                self.slots.release(self.running.pop()[1])
            while self.in_flight:
                self.read()
            first = self.waiting[0]
            self.admit()
            assert self.running == [(first, self.slots.loaded[first.digest])]


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40)


def shape(**changes: int) -> Shape:
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 32, "adapters": 1}
    return Shape(page_size=4, spans=(ALL,), num_pages=(30,), **{**sizes, **changes})


def test_requests_without_adapters_pass_those_that_wait_for_a_slot() -> None:
    engine = SimulatedEngine(shape(max_num_seqs=3))
    arrivals = [
        Arrival(request("1", prompt_of(4), max_tokens=20, adaptation=A), at=0),
        Arrival(request("2", prompt_of(4), max_tokens=4, adaptation=B), at=1),
        Arrival(request("3", prompt_of(4), max_tokens=4), at=2),
    ]
    order: list[str] = []
    for arrival in arrivals:
        engine.add(arrival.request)
    while not engine.idle:
        order += [str(output.request_id) for output in engine.step() if output.finish_reason]
    assert order == ["3", "1", "2"]


def test_a_stream_of_one_adapter_does_not_starve_another() -> None:
    engine = SimulatedEngine(shape())
    arrivals = [Arrival(request(str(i), prompt_of(4), max_tokens=3, adaptation=A), at=i) for i in range(30)]
    arrivals.append(Arrival(request("b", prompt_of(4), max_tokens=3, adaptation=B), at=3))
    results = run(engine, arrivals, max_steps=300)
    check_results(arrivals, results)
    check_idle(engine)
    assert [digest for _, digest in engine.runner.loads] == ["a", "b", "a"]  # type: ignore[attr-defined]


def test_pages_of_one_adapter_are_not_found_by_another() -> None:
    engine = SimulatedEngine(shape(adapters=3))
    prompt = prompt_of(12)

    def hits(name: str, one: Adaptation | None) -> int:
        engine.add(request(name, prompt, max_tokens=1, adaptation=one))
        return max(output.num_cached_tokens for _ in range(3) for output in engine.step())

    assert [hits("1", None), hits("2", A), hits("3", B), hits("4", adaptation("a", scale=2.0))] == [0, 0, 0, 0]
    assert [hits("5", None), hits("6", A), hits("7", B), hits("8", adaptation("a", scale=2.0))] == [8, 8, 8, 8]


def test_an_adapter_that_cannot_be_read_ends_its_requests_alone() -> None:
    engine = SimulatedEngine(shape(max_num_seqs=3))
    engine.runner.unreadable.add("b")  # type: ignore[attr-defined]
    for name, one in (("1", A), ("2", B), ("3", B), ("4", None)):
        engine.add(request(name, prompt_of(4), max_tokens=2, adaptation=one))
    ended = {}
    while not engine.idle:
        ended |= {output.request_id: output.error for output in engine.step() if output.finish_reason}
    assert {name: None if error is None else str(error) for name, error in ended.items()} == {
        "1": None,
        "2": "b has changed",
        "3": "b has changed",
        "4": None,
    }
    check_idle(engine)


def test_an_engine_without_slots_refuses_adapters() -> None:
    engine = SimulatedEngine(shape(adapters=0))
    with pytest.raises(InvalidRequest, match="--enable-lora"):
        engine.add(request("1", prompt_of(4), max_tokens=2, adaptation=A))
    assert engine.idle
