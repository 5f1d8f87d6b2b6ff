"""Engines that compute nothing: they take time, and hold memory that is counted, as those of processes do."""

from __future__ import annotations

import asyncio

from llmjax.engine.need import MEMORY, Need
from llmjax.errors import CheckpointError, EngineDead

BEGIN, READ, SLEEP, WAKE, END = 0.5, 3.0, 0.25, 0.5, 1.0  # seconds


class Machine:
    """Where they run.

    Attributes:
        needs: what each model needs, by name.
        held: bytes that each holds.
        broken: models that cannot be loaded.
        engines: those that run.
        events: what happened, in words.
    """

    def __init__(self, needs: dict[str, Need]) -> None:
        self.needs = needs
        self.held = dict.fromkeys(needs, 0)
        self.broken: set[str] = set()
        self.engines: dict[str, StandInEngine] = {}
        self.events: list[str] = []

    def begin(self, name: str) -> StandInLoading:
        self.events.append(f"begin {name}")
        return StandInLoading(self, name)


class StandInLoading:
    def __init__(self, machine: Machine, name: str) -> None:
        self._machine = machine
        self._name = name
        self._stopped = asyncio.Event()
        self._engine: StandInEngine | None = None

    async def measured(self) -> Need:
        await self._pass(BEGIN)
        return self._machine.needs[self._name]

    def proceed(self) -> None:
        self._machine.held[self._name] = self._machine.needs[self._name].awake[MEMORY]

    async def loaded(self) -> StandInEngine:
        await self._pass(READ)
        if self._name in self._machine.broken:
            raise CheckpointError(f"{self._name} has no weights")
        assert self._name not in self._machine.engines
        engine = self._engine = self._machine.engines[self._name] = StandInEngine(self._machine, self._name)
        self._machine.events.append(f"load {self._name}")
        return engine

    def stop(self) -> None:
        self._stopped.set()
        if self._engine is not None:
            self._engine.die()

    async def ended(self) -> None:
        assert self._stopped.is_set()
        await asyncio.sleep(END)
        self._machine.held[self._name] = 0

    async def _pass(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            return
        raise CheckpointError("its process has ended")


class StandInEngine:
    def __init__(self, machine: Machine, name: str) -> None:
        self._machine = machine
        self.name = name
        self.num_requests = 0
        self.is_sleeping = False
        self.hangs = False
        self._dead = asyncio.Event()
        self.ended = False

    def check_health(self) -> None:
        if self.hangs:
            raise EngineDead("the engine hangs")

    def die(self) -> None:
        self._machine.events.append(f"death of {self.name}")
        self._dead.set()

    @property
    def is_dead(self) -> bool:
        return self._dead.is_set()

    async def sleep(self, level: int, mode: str) -> None:
        assert (level, mode) == (1, "wait")
        await self._change(SLEEP)
        self.is_sleeping = True
        self._machine.held[self.name] = self._machine.needs[self.name].asleep[MEMORY]
        self._machine.events.append(f"sleep {self.name}")

    async def wake_up(self) -> None:
        self._machine.held[self.name] = self._machine.needs[self.name].awake[MEMORY]
        await self._change(WAKE)
        self.is_sleeping = False
        self._machine.events.append(f"wake {self.name}")

    async def _change(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self.is_dead:
            raise CheckpointError("the engine is not running")

    async def wait_died(self) -> int:
        await self._dead.wait()
        return 137

    async def shutdown(self) -> None:
        if self.ended:
            return
        await asyncio.sleep(END)
        self.ended = True
        self._machine.held[self.name] = 0
        if self._machine.engines.get(self.name) is self:
            del self._machine.engines[self.name]
        self._machine.events.append(f"end {self.name}")
