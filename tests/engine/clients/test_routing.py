"""The router's choice of an engine, and its counts, which are those of the open requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmjax.engine.clients.routing import FIRST_GUESS, PrefixIndex, Router
from llmjax.engine.core.request import EngineOutput, EngineRequest, SequenceTimes
from llmjax.sampling.params import SamplingParams
from tests.engine.core.test_scheduler import adaptation

PAGE = 4


def request(
    number: int, prompt: list[int], *, max_tokens: int = 10, salt: str | None = None, **params: object
) -> EngineRequest:
    return EngineRequest(
        request_id=number,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        cache_salt=salt,
    )


def output(number: int, count: int, *, index: int = 0, reason: str | None = None) -> EngineOutput:
    return EngineOutput(
        request_id=number,
        index=index,
        times=SequenceTimes(arrival=0),
        new_token_ids=[7] * count,
        finish_reason=reason,
    )


def router(engines: int = 2, capacity: int = 100) -> Router:
    return Router(engines, page_size=PAGE, capacity=capacity)


PROMPT = list(range(100))


def test_requests_without_a_common_prefix_go_where_less_is_queued() -> None:
    routes = router(3)
    assert routes.send(request(0, PROMPT[:50]), [0, 1, 2]) == 0
    assert [routes.send(request(i, [i] * 10), [0, 1, 2]) for i in (1, 2)] == [1, 2]
    assert [routes.queued(engine) for engine in range(3)] == [50 + 10, 10 + 10, 10 + 10]
    # The long prompt has been computed: what is left of it are the tokens to come.
    routes.note([output(0, 4)])
    assert routes.queued(0) == 10 - 4
    assert routes.send(request(3, [3] * 10), [0, 1, 2]) == 0


def test_idle_engines_take_turns() -> None:
    routes = router(3)
    seen = []
    for i in range(6):
        seen.append(routes.send(request(i, [i]), [0, 1, 2]))
        routes.note([output(i, 1, reason="stop")])
    assert seen == [0, 1, 2, 0, 1, 2]


def test_a_prefix_is_found_until_the_queue_is_longer_than_it() -> None:
    """The prefix of 96 tokens weighs as much as 96 tokens in the queue."""
    routes = router()
    assert routes.send(request(0, PROMPT), [0, 1]) == 0
    routes.note([output(0, 1, reason="stop")])
    assert routes.send(request(1, [500] * 10), [0, 1]) == 1  # the other one is used next
    routes.note([output(1, 1, reason="stop")])
    # 4 tokens to compute and 10 to generate each: the seventh finds 84 in the queue, the eighth 98.
    assert [routes.send(request(i, PROMPT), [0, 1]) for i in range(2, 10)] == [0] * 7 + [1]
    # Now both have it, and 98 and 110 tokens to compute.
    assert [routes.send(request(i, PROMPT), [0, 1]) for i in (10, 11, 12)] == [0, 1, 0]


def test_whom_the_engines_do_not_let_share_is_not_matched() -> None:
    routes = router()
    first = routes.send(request(0, PROMPT, salt="a"), [0, 1])
    routes.note([output(0, 1, reason="stop")])
    other = 1 - first
    # Of two idle engines that match nothing, the one that was not used last.
    assert routes.send(request(1, PROMPT, salt="b"), [0, 1]) == other
    routes.note([output(1, 1, reason="stop")])
    assert routes.send(request(2, PROMPT), [0, 1]) == first
    routes.note([output(2, 1, reason="stop")])
    # All positions of a scored prompt are computed, found or not.
    assert routes.send(request(3, PROMPT, salt="a", prompt_logprobs=1), [0, 1]) == other
    routes.note([output(3, 1, reason="stop")])
    assert [routes.send(request(4 + i, PROMPT, salt=salt), [0, 1]) for i, salt in enumerate("ba")] == [other, first]
    none = router(capacity=0)
    assert [none.send(request(i, PROMPT), [0, 1]) for i in range(2)] == [0, 1]


def test_a_page_is_only_found_behind_those_before_it() -> None:
    index = PrefixIndex(3)
    index.add([b"1", b"2", b"3"])
    assert index.matched([b"1", b"2", b"4", b"3"]) == 2
    index.add([b"5"])  # the last page of the prompt goes
    assert (index.matched([b"1", b"2", b"3"]), index.matched([b"5"]), len(index)) == (2, 1, 3)
    index.add([b"1"])
    index.add([b"6", b"7", b"8", b"9"])  # more than fit: the first ones
    assert (index.matched([b"6", b"7", b"8", b"9"]), len(index)) == (3, 3)
    index.clear()
    assert index.matched([b"6"]) == len(index) == 0


def test_lengths_are_guessed_from_past_ones() -> None:
    routes = router(1)
    routes.send(request(0, [1], max_tokens=1000), [0])
    assert routes.queued(0) == 1 + FIRST_GUESS
    routes.send(request(1, [1], max_tokens=1000, ignore_eos=True), [0])
    assert routes.queued(0) == 1 + FIRST_GUESS + 1001
    routes.note([output(0, 1, reason="abort"), output(1, 1, reason="error")])  # these say nothing of lengths
    for number in range(2, 400):
        routes.send(request(number, [1], max_tokens=1000, ignore_eos=True), [0])
        routes.note([output(number, 20, reason="length")])
    routes.send(request(400, [1], max_tokens=1000), [0])
    assert routes.queued(0) == 1 + 20
    routes.note([output(400, 500)])
    assert routes.queued(0) == 1  # longer than was thought: it needs at least one more step


@pytest.mark.parametrize("n", [1, 3])
def test_a_dead_engine_has_nothing_and_says_what_it_had(n: int) -> None:
    routes = router()
    for number in range(4):
        routes.send(request(number, PROMPT, n=n), [0, 1])
    there = [number for number in range(4) if routes.engine_of(number) == 0]
    routes.note([output(there[0], 1, index=n - 1, reason="stop")])
    lost = routes.drop(0)
    assert lost == [(i, k) for i in there for k in range(n) if (i, k) != (there[0], n - 1)]
    assert routes.queued(0) == 0 and routes.requests_of(0) == []
    before = routes.queued(1)
    routes.note([output(number, 1) for number in there])  # too late to matter
    assert (routes.queued(0), routes.queued(1)) == (0, before)
    # Its pages are gone: an empty engine beside an idle one that has the prompt.
    for number in routes.requests_of(1):
        routes.note([output(number, 1, index=k, reason="stop") for k in range(n)])
    assert routes.send(request(9, PROMPT), [0, 1]) == (1 if len(there) < 4 else 0)


class Routing(RuleBasedStateMachine):
    """Runs any requests, outputs and deaths: only living engines are chosen, and no count is left over."""

    @initialize(engines=st.integers(1, 4), capacity=st.integers(0, 12))
    def begin(self, engines: int, capacity: int) -> None:
        self.engines, self.capacity = engines, capacity
        self.router = router(engines, capacity)
        self.open: dict[int, dict[int, int]] = {}  # continuations left of each request, and what each has generated
        self.at: dict[int, int] = {}
        self.count = 0

    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        among = data.draw(st.sets(st.integers(0, self.engines - 1), min_size=1))
        prompt = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=20))
        n = data.draw(st.integers(1, 3))
        chosen = self.router.send(request(self.count, prompt, max_tokens=data.draw(st.integers(1, 300)), n=n), among)
        assert chosen in among
        self.open[self.count] = dict.fromkeys(range(n), 0)
        self.at[self.count] = chosen
        self.count += 1

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def bring(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        index = data.draw(st.sampled_from(sorted(self.open[number])))
        reason = data.draw(st.sampled_from([None, "stop", "length", "abort", "error"]))
        self.router.note([output(number, data.draw(st.integers(0, 200)), index=index, reason=reason)])
        if reason is not None:
            del self.open[number][index]
            if not self.open[number]:
                del self.open[number], self.at[number]

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        engine = data.draw(st.integers(0, self.engines - 1))
        expected = [(number, index) for number in self.open if self.at[number] == engine for index in self.open[number]]
        assert sorted(self.router.drop(engine)) == expected
        for number in [number for number, at in self.at.items() if at == engine]:
            del self.open[number], self.at[number]

    @invariant()
    def counts(self) -> None:
        for engine in range(getattr(self, "engines", 0)):
            there = [number for number, at in self.at.items() if at == engine]
            assert sorted(self.router.requests_of(engine)) == there
            unfinished = sum(len(self.open[number]) for number in there)
            # Each continuation has a token to come, at least; without any, nothing is queued.
            assert self.router.queued(engine) >= unfinished
            assert (self.router.queued(engine) == 0) == (not there)
            assert len(self.router._indexes[engine]) <= self.capacity
        for number, at in getattr(self, "at", {}).items():
            assert self.router.engine_of(number) == at


def test_engines_are_known_to_have_pages_of_an_adapter_and_not_of_another() -> None:
    routes = router()
    first = routes.send(replace(request(0, PROMPT), adaptation=adaptation("a")), [0, 1])
    routes.note([output(0, 10, reason="stop")])
    other = 1 - first
    assert routes.send(replace(request(1, PROMPT), adaptation=adaptation("b")), [0, 1]) == other
    routes.note([output(1, 10, reason="stop")])
    found = [routes.send(replace(request(2 + i, PROMPT), adaptation=adaptation(n)), [0, 1]) for i, n in enumerate("ba")]
    assert found == [other, first]


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
