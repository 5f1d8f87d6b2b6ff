"""Models that share a machine: loaded when they are asked for, kept while there is room, each in a process of its own.

Belongs to one event loop. A model that is asked for is brought by a task of its own; one task at a time may look for
room, so that the models that were asked for first come first, and nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from llmjax.engine.clients.restarts import RestartPolicy, Restarts
from llmjax.engine.need import CARD, MEMORY, Need
from llmjax.errors import EngineDead, LLMJaxError, ModelUnavailable
from llmjax.several.room import NoRoom, Place, make_room, missing

logger = logging.getLogger(__name__)

Phase = Literal["unloaded", "loading", "loaded", "leaving", "sleeping", "failed"]

CARD_SHARE = int(0.95 * CARD)  # of a card's memory; the rest is for what each process takes beside its pool
BUSY_SECONDS = 5.0  # after which asking again for a model without room makes sense
LOOK_SECONDS = 10.0  # between questions to an engine whether it still answers
POLICY = RestartPolicy()


class Engine(Protocol):
    """What a pool needs of ``AsyncLLM``."""

    @property
    def num_requests(self) -> int: ...

    @property
    def is_sleeping(self) -> bool: ...

    async def sleep(self, level: int, mode: str) -> None: ...

    async def wake_up(self) -> None: ...

    async def wait_died(self) -> int: ...

    def check_health(self) -> None: ...

    async def shutdown(self) -> None: ...


class Loading(Protocol):
    """An engine that is about to be there."""

    async def measured(self) -> Need:
        """What it needs; raises LLMJaxError if that cannot be known."""

    def proceed(self) -> None:
        """Lets it take that."""

    async def loaded(self) -> Engine:
        """The engine; raises LLMJaxError if it cannot be loaded."""

    def stop(self) -> None:
        """Ends it, whatever it does, and the engine that it has become: what is awaited of it fails soon."""

    async def ended(self) -> None:
        """Returns when it has given everything back, after ``stop``."""


@dataclass(frozen=True, kw_only=True)
class Manners:
    """How a model is treated.

    Args:
        load_at_start: whether it is loaded before the first request.
        keep_alive: seconds that it stays after its last request, perhaps ``inf``, unless others need the room.
        pinned: whether it stays whoever needs the room.
    """

    load_at_start: bool = True
    keep_alive: float = math.inf
    pinned: bool = False


@dataclass(eq=False)
class PooledModel:
    """One of the models.

    Attributes:
        phase: where it is; "leaving": it is being unloaded or put to sleep.
        engine: while it is loaded or sleeps.
        need: what it needed when it was measured last.
        held: amounts that it holds.
        after: amounts that it will hold once it has left.
        leases: requests that use it.
        waiting: requests that wait for it; ``due`` of them are served before it leaves.
        used: when it was last used, on the loop's clock.
        expires: when it will be unloaded, on that clock; None: not by itself.
        failure: why it could not be loaded, or has died, as clients are told.
        retry_at: when it may be tried again, on that clock.
        removed: whether it is about to be forgotten, and takes no new requests.
        loads, unloads, failures: counts since the start.
    """

    name: str
    manners: Manners
    phase: Phase = "unloaded"
    engine: Engine | None = None
    need: Need | None = None
    held: Mapping[str, int] = field(default_factory=dict)
    after: Mapping[str, int] = field(default_factory=dict)
    leases: int = 0
    waiting: int = 0
    due: int = 0
    used: float = -math.inf
    failure: str = ""
    retry_at: float = -math.inf
    removed: bool = False
    loads: int = 0
    unloads: int = 0
    failures: int = 0
    deaths: Restarts = field(default_factory=lambda: Restarts(POLICY))
    loading: Loading | None = None
    bringing: asyncio.Task[None] | None = None
    leaving: asyncio.Task[None] | None = None
    watch: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Whether it may not be taken away now."""
        if self.phase == "loaded" and self.engine is not None:
            return self.leases > 0 or self.due > 0 or self.engine.num_requests > 0
        return self.phase in ("loading", "leaving")

    @property
    def expires(self) -> float | None:
        return None if self.timer is None else self.timer.when()

    @property
    def place(self) -> Place:
        """What it holds once it has left, if it is about to."""
        asleep = None
        if self.phase == "loaded" and self.need is not None and self.engine is not None and not self.engine.is_sleeping:
            asleep = self.need.asleep
        return Place(
            held=self.after if self.phase == "leaving" else self.held,
            asleep=asleep,
            used=self.used,
            busy=self.busy,
            pinned=self.manners.pinned,
        )


class _Unwanted(Exception):
    """Nobody waits for the model any more."""


class ModelPool:
    """The models of a server.

    Args:
        manners: the models, by name.
        begin: starts to load one; it is called for one model at a time.
        memory: bytes of the machine's memory for all of them.
        patience: seconds that a request waits for a model.

    Attributes:
        models: the models, by name.
    """

    def __init__(
        self,
        manners: Mapping[str, Manners],
        begin: Callable[[str], Loading],
        *,
        memory: int,
        patience: float,
    ) -> None:
        self.models = {name: PooledModel(name, own) for name, own in manners.items()}
        self.memory = memory
        self._begin = begin
        self.patience = patience
        self._turn = asyncio.Lock()  # whoever has it looks for room
        self._crowded: frozenset[str] = frozenset()  # busy models that take no new requests, as others need the room
        self._changed = asyncio.Event()
        self._starting = False
        self._closed = False

    async def start(self) -> None:
        """Loads the models that are wanted from the start on; one that fails leaves the others.

        Raises:
            ModelUnavailable: all of them fail; it says why the first one does.
        """
        wanted = [model for model in self.models.values() if model.manners.load_at_start]
        self._starting = True
        for model in wanted:
            self._bring(model)
        await asyncio.gather(*(model.bringing for model in wanted if model.bringing is not None))
        self._starting = False
        if wanted and all(model.phase == "failed" for model in wanted):
            raise ModelUnavailable(f"no model could be loaded; {wanted[0].name}: {wanted[0].failure}")

    @asynccontextmanager
    async def using(self, name: str, *, keep_alive: float | None = None) -> AsyncIterator[Engine]:
        """A model's engine, which stays at least until the block ends.

        Args:
            keep_alive: seconds that the model stays afterwards; None: as its manners say.

        Raises:
            ModelUnavailable: it cannot be loaded, or there is no room for it in time.
        """
        if (model := self.models.get(name)) is None:
            raise _deleted(name)
        await self._until_there(model)
        engine = model.engine
        assert engine is not None
        with self.holding(name, keep_alive=keep_alive):
            yield engine

    @contextmanager
    def holding(self, name: str, *, keep_alive: float | None = None) -> Iterator[None]:
        """Goes on using a model; to be begun where it is in use. Arguments as for ``using``."""
        model = self.models[name]
        self._set_timer(model, math.inf)
        model.leases += 1
        try:
            yield
        finally:
            model.leases -= 1
            model.used = self._now
            if not model.leases and model.phase == "loaded":
                self._set_timer(model, model.manners.keep_alive if keep_alive is None else keep_alive)
            self._pulse()

    async def unload(self, name: str) -> None:
        """Unloads a model once its requests have ended; a pinned one stays. The next request loads it again."""
        model = self.models[name]
        while model.engine is not None and not model.manners.pinned and not self._closed:
            if not model.busy and model.bringing is None:
                self._leave(model, self._unloaded(model), after={})
            await self._changed.wait()

    def add(self, name: str, manners: Manners) -> None:
        """Has one more model, which is loaded when it is asked for; ``begin`` knows it."""
        assert name not in self.models
        self.models[name] = PooledModel(name, manners)

    async def remove(self, name: str) -> None:
        """Forgets a model once its requests have ended, pinned or not; those that wait for it fail."""
        model = self.models[name]
        model.removed = True
        self._pulse()
        if model.loading is not None:
            model.loading.stop()
        while model.engine is not None or model.bringing is not None or model.waiting:
            if self._closed:
                return  # whoever closes it ends the model
            if model.engine is not None and not model.busy and model.bringing is None:
                self._leave(model, self._unloaded(model), after={})
            await self._changed.wait()
        del self.models[name]

    async def shutdown(self) -> None:
        """Ends all engines, and what is being loaded; a second call goes on where a first one was canceled."""
        self._closed = True
        self._pulse()
        for model in self.models.values():
            if model.loading is not None:
                model.loading.stop()
        while any(model.bringing or model.leaving for model in self.models.values()):
            await self._changed.wait()
        await asyncio.gather(*(self._end(model) for model in self.models.values()))

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _pulse(self) -> None:
        """Has everybody who waits for a change look again."""
        self._changed.set()
        self._changed.clear()

    def is_there(self, name: str) -> bool:
        """Whether a model can be used without waiting."""
        model = self.models[name]
        return model.phase == "loaded" and name not in self._crowded and not self._refuses(model)

    async def _until_there(self, model: PooledModel) -> None:
        """Returns when the model can be used, as it can be until something else is awaited."""
        if self.is_there(model.name):
            return
        crowded = model.phase == "loaded" and model.name in self._crowded
        model.waiting += 1
        model.due += not crowded
        try:
            async with asyncio.timeout(self.patience):
                while model.phase != "loaded" or (crowded and model.name in self._crowded) or self._refuses(model):
                    if crowded and model.phase != "loaded":  # it has left: others may not push in front any more
                        crowded = False
                        model.due += 1
                    self._check(model)
                    if model.phase in ("unloaded", "sleeping", "failed"):
                        self._bring(model)
                    await self._changed.wait()
        except TimeoutError:
            others = sorted(name for name, other in self.models.items() if other.leases and other is not model)
            why = f"; requests are running on {', '.join(others)}" if others else ""
            raise ModelUnavailable(
                f"the model {model.name} could not be loaded within {self.patience:g} s{why}",
                retry_after=BUSY_SECONDS,
            ) from None
        finally:
            model.waiting -= 1
            model.due -= not crowded
            self._pulse()

    def _refuses(self, model: PooledModel) -> bool:
        return self._closed or model.removed

    def _check(self, model: PooledModel) -> None:
        """Raises ModelUnavailable where the model is not brought now."""
        if self._closed:
            raise ModelUnavailable("the server is shutting down", retry_after=BUSY_SECONDS)
        if model.removed:
            raise _deleted(model.name)
        left = model.retry_at - self._now
        if model.phase == "failed" and left > 0:
            raise ModelUnavailable(f"the model {model.name} is not there: {model.failure}", retry_after=left)

    def _bring(self, model: PooledModel) -> None:
        if model.bringing is None:
            model.bringing = asyncio.create_task(self._brought(model))

    async def _brought(self, model: PooledModel) -> None:
        """Loads a model, or wakes it."""
        try:
            async with self._turn:
                while model.phase == "leaving":
                    await self._changed.wait()
                self._check_wanted(model)
                if model.engine is None:
                    model.loading = self._begin(model.name)
                    model.need = await model.loading.measured()
                assert model.need is not None
                await self._make_room(model, model.need.awake)
                model.phase, model.held = "loading", model.need.awake
            if model.loading is not None:
                model.loading.proceed()
                model.engine = await model.loading.loaded()
                model.watch = asyncio.create_task(self._watched(model, model.engine, model.loading))
                model.loads += 1
                logger.info("%s is loaded", model.name)
            elif model.engine is not None:
                await model.engine.wake_up()
        except _Unwanted:
            await self._give_up(model)
        except Exception as error:
            await self._give_up(model)
            await self._end(model)
            self._fail(model, error)
        else:
            model.loading, model.phase, model.used = None, "loaded", self._now
            self._set_timer(model, model.manners.keep_alive)
        finally:
            model.bringing = None
            self._pulse()

    async def _give_up(self, model: PooledModel) -> None:
        """Ends what is being loaded."""
        if model.loading is not None:
            model.loading.stop()
            await model.loading.ended()
            model.loading = None

    def _check_wanted(self, model: PooledModel) -> None:
        if self._closed or not (model.waiting or self._starting):
            raise _Unwanted

    async def _make_room(self, model: PooledModel, need: Mapping[str, int]) -> None:
        """Returns when what the model needs is free."""
        budget = {name: self.memory if name == MEMORY else CARD_SHARE for name in need}
        others = [other for other in self.models.values() if other is not model]
        try:
            while missing(need, budget, [other.held for other in others]):
                self._check_wanted(model)
                places = {other.name: other.place for other in others}
                if self._starting:  # what is loaded at the start is not unloaded for the next one
                    places = {name: replace(place, pinned=True) for name, place in places.items()}
                room = make_room(need, budget, places)
                self._crowded = frozenset(room.wait)
                for name in room.sleep:
                    other = self.models[name]
                    assert other.need is not None
                    self._leave(other, self._slept(other), after=other.need.asleep)
                for name in room.unload:
                    self._leave(self.models[name], self._unloaded(self.models[name]), after={})
                await self._changed.wait()
        except NoRoom as error:
            raise ModelUnavailable(_no_room(error, budget, need)) from None
        finally:
            self._crowded = frozenset()

    def _leave(self, model: PooledModel, work: Coroutine[Any, Any, None], *, after: Mapping[str, int]) -> None:
        """Begins to take a model away."""
        model.phase, model.after = "leaving", after
        model.leaving = asyncio.create_task(work)

    async def _slept(self, model: PooledModel) -> None:
        assert model.engine is not None and model.need is not None
        try:
            await model.engine.sleep(1, "wait")
        except Exception as error:
            await self._end(model)
            self._fail(model, error)
        else:
            model.phase, model.held = "sleeping", model.need.asleep
        finally:
            model.leaving = None
            self._pulse()

    async def _unloaded(self, model: PooledModel, *, failure: Exception | None = None) -> None:
        try:
            await self._end(model)
            model.unloads += 1
            if failure is not None:
                self._fail(model, failure)
            else:
                logger.info("%s is unloaded", model.name)
        finally:
            model.leaving = None
            self._pulse()

    async def _end(self, model: PooledModel) -> None:
        """Ends a model's engine; what it held is free when its process has gone."""
        self._set_timer(model, math.inf)
        if model.watch is not None:
            model.watch.cancel()
            model.watch = None
        if model.engine is not None:
            await model.engine.shutdown()
        model.engine, model.held, model.phase = None, {}, "unloaded"

    async def _watched(self, model: PooledModel, engine: Engine, loading: Loading) -> None:
        """Notices when an engine dies, and ends one that hangs; the next request starts another.

        Args:
            loading: what has loaded it, and can end it.
        """
        died, hung = asyncio.ensure_future(engine.wait_died()), ""
        try:
            while not (await asyncio.wait({died}, timeout=LOOK_SECONDS))[0]:
                try:
                    engine.check_health()
                except EngineDead as error:
                    hung = hung or str(error)
                    loading.stop()
            status = died.result()
        finally:
            died.cancel()
        if model.engine is not engine or model.phase not in ("loaded", "sleeping"):
            return  # whoever changes the model notices by himself
        model.watch = None
        failure = EngineDead(f"{hung}, and was ended" if hung else f"its engine has died, with status {status}")
        self._leave(model, self._unloaded(model, failure=failure), after={})

    def _fail(self, model: PooledModel, error: Exception) -> None:
        wait = model.deaths.died(self._now)
        model.phase, model.failures = "failed", model.failures + 1
        told = isinstance(error, ModelUnavailable | EngineDead)  # others name files of this machine
        model.failure = str(error) if told else "it could not be loaded; the server's log says why"
        model.retry_at = self._now + (POLICY.longest_wait if wait is None else wait)
        trace = None if isinstance(error, LLMJaxError) else error
        logger.error("%s is not there: %s", model.name, error, exc_info=trace)

    def _set_timer(self, model: PooledModel, seconds: float) -> None:
        """Has an idle model unloaded after that time, in place of any before."""
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None
        if math.isfinite(seconds) and not model.manners.pinned and not self._closed:
            model.timer = asyncio.get_running_loop().call_later(seconds, self._expire, model)

    def _expire(self, model: PooledModel) -> None:
        model.timer = None
        if model.phase in ("loaded", "sleeping") and not model.busy and not model.waiting and model.bringing is None:
            self._leave(model, self._unloaded(model), after={})


def _deleted(name: str) -> ModelUnavailable:
    return ModelUnavailable(f"the model {name} has been deleted")


def _no_room(error: NoRoom, budget: Mapping[str, int], need: Mapping[str, int]) -> str:
    """What is missing, in words."""
    name = next(iter(error.missing))
    if name == MEMORY:
        amounts = (f"{amount / 2**20:,.0f} MiB" for amount in (need[name], budget[name], error.missing[name]))
        return "it needs {}, all models may take {}, and {} are missing beside those that stay".format(*amounts)
    shares = (f"{amount / CARD:.2f}" for amount in (need[name], budget[name], error.missing[name]))
    return f"of the memory of {name} " + "it needs {}, all models may take {}, and {} are missing".format(*shares)
