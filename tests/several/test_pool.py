"""A pool of models with engines that compute nothing, on a clock that jumps."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmjax.engine.need import Need
from llmjax.errors import ModelUnavailable
from llmjax.several.pool import LOOK_SECONDS, Manners, ModelPool
from tests.several.engines import END, Machine
from tests.virtual_time import VirtualLoop, run

DEMAND = Manners(load_at_start=False)


def need(weights: int, kv: int = 0) -> Need:
    return Need(weight_bytes=weights, kv_bytes=kv, other_bytes=0)


def pool_of(machine: Machine, *, memory: int = 100, patience: float = 60.0, **manners: Manners) -> ModelPool:
    own = {name: manners.get(name, DEMAND) for name in machine.needs}
    return ModelPool(own, machine.begin, memory=memory, patience=patience)


async def use(pool: ModelPool, name: str, seconds: float = 0.0, **options: Any) -> None:
    async with pool.using(name, **options) as engine:
        assert getattr(engine, "name", None) == name
        await asyncio.sleep(seconds)


def phases(pool: ModelPool) -> dict[str, str]:
    return {name: model.phase for name, model in pool.models.items()}


def test_models_of_the_start_are_there_and_others_come_when_asked_for() -> None:
    async def main() -> None:
        machine = Machine({"a": need(40), "b": need(40)})
        pool = pool_of(machine, a=Manners())
        await pool.start()
        assert phases(pool) == {"a": "loaded", "b": "unloaded"}
        await asyncio.gather(*(use(pool, "b") for _ in range(5)))
        assert phases(pool) == {"a": "loaded", "b": "loaded"}
        assert machine.events == ["begin a", "load a", "begin b", "load b"]
        await pool.shutdown()
        assert machine.held == {"a": 0, "b": 0}

    run(main())


def test_the_least_recently_used_sleeps_and_is_unloaded_when_that_is_not_enough() -> None:
    async def main() -> None:
        machine = Machine({"a": need(20, 30), "b": need(20, 30), "c": need(30), "d": need(100)})
        pool = pool_of(machine)
        for name in ("a", "b", "a", "c"):
            await use(pool, name, 1.0)
        assert phases(pool) == {"a": "loaded", "b": "sleeping", "c": "loaded", "d": "unloaded"}
        await use(pool, "b")  # waking takes memory that a has
        assert machine.events[-2:] == ["sleep a", "wake b"]
        await use(pool, "d")
        assert phases(pool) == {"a": "unloaded", "b": "unloaded", "c": "unloaded", "d": "loaded"}
        await pool.shutdown()

    run(main())


def test_models_in_use_stay_and_new_requests_let_others_pass_in_time() -> None:
    async def main() -> None:
        machine = Machine({"a": need(60), "b": need(60)})
        pool = pool_of(machine)
        long = asyncio.create_task(use(pool, "a", 20.0))
        await asyncio.sleep(5)
        wanting = asyncio.create_task(use(pool, "b", 1.0))
        await asyncio.sleep(2)
        assert phases(pool)["a"] == "loaded"
        late = asyncio.create_task(use(pool, "a", 1.0))  # does not push in front of b
        await asyncio.gather(long, wanting, late)
        assert [event for event in machine.events if event.startswith("load")] == ["load a", "load b", "load a"]
        await pool.shutdown()

    run(main())


def test_waiting_is_bounded_and_the_error_names_who_is_in_use() -> None:
    async def main() -> None:
        machine = Machine({"a": need(60), "b": need(60)})
        pool = pool_of(machine, patience=10.0)
        long = asyncio.create_task(use(pool, "a", 60.0))
        await asyncio.sleep(5)
        with pytest.raises(ModelUnavailable, match=r"b could not be loaded within 10 s; requests are running on a"):
            await use(pool, "b")
        await use(pool, "a")  # nobody wants b any more
        await long
        await pool.shutdown()
        assert machine.held == {"a": 0, "b": 0}

    run(main())


def test_pinned_models_stay_and_what_never_fits_says_so() -> None:
    async def main() -> None:
        machine = Machine({"a": need(60), "b": need(60 * 2**20)})
        pool = pool_of(machine, a=Manners(pinned=True), memory=100 * 2**20)
        machine.needs["a"] = need(60 * 2**20)
        await pool.start()
        message = "it needs 60 MiB, all models may take 100 MiB, and 20 MiB are missing beside those that stay"
        with pytest.raises(ModelUnavailable, match=message):
            await use(pool, "b")
        await pool.unload("a")
        assert phases(pool) == {"a": "loaded", "b": "failed"}
        await pool.shutdown()

    run(main())


def test_models_leave_when_their_time_is_over() -> None:
    async def main() -> None:
        machine = Machine({"a": need(10), "b": need(10), "c": need(10)})
        pool = pool_of(machine, a=Manners(load_at_start=False, keep_alive=30.0))
        await use(pool, "a")
        await asyncio.sleep(29)
        await use(pool, "a")
        await asyncio.sleep(29)
        assert phases(pool)["a"] == "loaded"
        await asyncio.sleep(3)
        assert phases(pool)["a"] == "unloaded"
        await use(pool, "b", keep_alive=0.0)
        await asyncio.sleep(END + 1)
        assert phases(pool)["b"] == "unloaded"
        await use(pool, "a", keep_alive=math.inf)
        await use(pool, "c", 100.0, keep_alive=1.0)
        assert phases(pool) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        await pool.unload("c")
        assert machine.held == {"a": 10, "b": 0, "c": 0}
        await pool.shutdown()

    run(main())


def test_a_model_that_fails_leaves_the_others_and_is_tried_again_later() -> None:
    async def main() -> None:
        machine = Machine({"a": need(10), "b": need(10)})
        machine.broken = {"a"}
        pool = pool_of(machine, a=Manners(), b=Manners())
        await pool.start()
        assert phases(pool) == {"a": "failed", "b": "loaded"}
        await use(pool, "b")
        with pytest.raises(ModelUnavailable, match="a is not there: it could not be loaded; the server's log says why"):
            await asyncio.gather(*(use(pool, "a") for _ in range(3)))
        machine.broken = set()
        await asyncio.sleep(pool.models["a"].retry_at - asyncio.get_running_loop().time())
        await use(pool, "a")
        assert phases(pool) == {"a": "loaded", "b": "loaded"}
        await pool.shutdown()

    run(main())


def test_nothing_is_served_where_no_model_can_be_loaded() -> None:
    async def main() -> None:
        machine = Machine({"a": need(10), "b": need(10)})
        machine.broken = {"a", "b"}
        pool = pool_of(machine, a=Manners(), b=Manners())
        with pytest.raises(ModelUnavailable, match="no model could be loaded; a: it could not be loaded"):
            await pool.start()
        await pool.shutdown()

    run(main())


def test_models_of_the_start_do_not_drive_each_other_out() -> None:
    async def main() -> None:
        machine = Machine({"a": need(60), "b": need(60)})
        pool = pool_of(machine, a=Manners(), b=Manners())
        await pool.start()
        assert phases(pool) == {"a": "loaded", "b": "failed"}
        await pool.shutdown()

    run(main())


def test_an_engine_that_dies_is_replaced_by_the_next_request() -> None:
    async def main() -> None:
        machine = Machine({"a": need(10), "b": need(10)})
        pool = pool_of(machine, a=Manners(), b=Manners())
        await pool.start()
        machine.engines["a"].die()
        await asyncio.sleep(END + 0.1)
        assert phases(pool) == {"a": "failed", "b": "loaded"} and machine.held["a"] == 0
        with pytest.raises(ModelUnavailable, match="a is not there: its engine has died, with status 137"):
            pool.models["a"].retry_at = math.inf
            await use(pool, "a")
        pool.models["a"].retry_at = 0
        await use(pool, "a")
        assert phases(pool)["a"] == "loaded"
        await pool.shutdown()

    run(main())


def test_an_engine_that_hangs_is_ended_and_the_others_go_on() -> None:
    async def main() -> None:
        machine = Machine({"a": need(10), "b": need(10)})
        pool = pool_of(machine, a=Manners(), b=Manners())
        await pool.start()
        running = asyncio.create_task(use(pool, "b", 3 * LOOK_SECONDS))
        machine.engines["a"].hangs = True
        await asyncio.sleep(LOOK_SECONDS + END + 0.1)
        assert phases(pool) == {"a": "failed", "b": "loaded"} and machine.held["a"] == 0
        assert pool.models["a"].failure == "the engine hangs, and was ended"
        await asyncio.sleep(pool.models["a"].retry_at - asyncio.get_running_loop().time())
        await use(pool, "a")
        await running
        assert machine.events.count("begin b") == 1
        await pool.shutdown()

    run(main())


def test_a_model_joins_and_leaves_when_its_requests_have_ended() -> None:
    async def main() -> None:
        machine = Machine({"a": need(10), "b": need(10)})
        pool = pool_of(machine, a=Manners())
        await pool.start()
        pool.add("c", Manners(load_at_start=False))
        machine.needs["c"], machine.held["c"] = need(30), 0
        running = asyncio.create_task(use(pool, "c", 20.0))
        await asyncio.sleep(10.0)
        leaving = asyncio.create_task(pool.remove("c"))
        await asyncio.sleep(0)
        with pytest.raises(ModelUnavailable, match="c has been deleted"):
            await use(pool, "c")
        assert not leaving.done() and not running.done()
        await asyncio.gather(leaving, running)
        assert set(pool.models) == {"a", "b"} and machine.held["c"] == 0 and "c" not in machine.engines
        with pytest.raises(ModelUnavailable, match="c has been deleted"):
            await use(pool, "c")
        await pool.shutdown()

    run(main())


def test_a_model_that_leaves_while_it_is_loaded_ends_at_once() -> None:
    async def main() -> None:
        machine = Machine({"a": need(10), "b": need(10)})
        pool = pool_of(machine)
        waiting = asyncio.create_task(use(pool, "a"))
        await asyncio.sleep(1.0)
        await pool.remove("a")
        with pytest.raises(ModelUnavailable, match="a has been deleted"):
            await waiting
        assert set(pool.models) == {"b"} and machine.held["a"] == 0 and not machine.engines
        await pool.shutdown()

    run(main())


def test_a_shutdown_ends_what_is_being_loaded() -> None:
    async def main() -> None:
        machine = Machine({"a": need(10), "b": need(100)})
        pool = pool_of(machine, a=Manners())
        await pool.start()
        waiting = asyncio.create_task(use(pool, "b"))
        await asyncio.sleep(1.5)
        await pool.shutdown()
        with pytest.raises(ModelUnavailable, match="shutting down"):
            await waiting
        assert machine.held == {"a": 0, "b": 0} and not machine.engines

    run(main())


NAMES = ("a", "b", "c", "d")
NEEDS = {"a": need(30, 20), "b": need(30, 20), "c": need(60), "d": need(5, 15)}
MEMORY = 100


class PoolMachine(RuleBasedStateMachine):
    """Requests, deaths and broken models at any time; memory is never exceeded, and every request ends."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop(jumps=True)
        self.machine = Machine(dict(NEEDS))
        self.tasks: list[asyncio.Task[None]] = []
        self.most_used = 0

        async def make() -> ModelPool:
            manners = {"d": Manners(pinned=True), "a": Manners(load_at_start=False, keep_alive=20.0)}
            pool = pool_of(self.machine, memory=MEMORY, patience=200.0, **manners)
            await pool.start()
            return pool

        self.pool = self.loop.run_until_complete(make())

    @rule(
        name=st.sampled_from(NAMES),
        seconds=st.sampled_from([0.0, 0.1, 2.0, 30.0]),
        keep_alive=st.sampled_from([None, 0.0, 5.0, math.inf]),
    )
    def request(self, name: str, seconds: float, keep_alive: float | None) -> None:
        self.tasks.append(self.loop.create_task(use(self.pool, name, seconds, keep_alive=keep_alive)))

    @precondition(lambda self: any(not task.done() for task in self.tasks))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([task for task in self.tasks if not task.done()])).cancel()

    @precondition(lambda self: self.machine.engines)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self.machine.engines[data.draw(st.sampled_from(sorted(self.machine.engines)))].die()

    @rule(name=st.sampled_from(NAMES))
    def break_or_mend(self, name: str) -> None:
        self.machine.broken ^= {name}

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 4.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    @invariant()
    def memory_suffices(self) -> None:
        assert sum(self.machine.held.values()) <= MEMORY
        assert sum(model.held.get("memory", 0) for model in self.pool.models.values()) <= MEMORY

    @invariant()
    def what_is_used_is_there(self) -> None:
        for model in self.pool.models.values():
            if model.leases and model.engine is not None and not model.engine.is_dead:
                assert model.phase == "loaded" and not model.engine.ended and not model.engine.is_sleeping

    async def ends(self) -> list[Any]:
        return await asyncio.gather(*self.tasks, return_exceptions=True)

    def teardown(self) -> None:
        ends = self.loop.run_until_complete(self.ends())
        assert all(isinstance(end, type(None) | ModelUnavailable | asyncio.CancelledError) for end in ends), ends
        for model in self.pool.models.values():
            assert model.leases == model.waiting == model.due == 0
        self.loop.run_until_complete(self.pool.shutdown())
        assert not any(self.machine.held.values()) and not self.machine.engines
        assert asyncio.all_tasks(self.loop) == set()
        self.loop.close()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
