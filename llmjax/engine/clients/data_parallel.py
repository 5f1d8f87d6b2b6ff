"""Data parallelism: several equal engines, each in its own process, used as one. They serve more requests at once, and
if one dies, the others survive."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from llmjax.adapters.reference import AdapterReference
from llmjax.checkpoint.resolve import resolve_model
from llmjax.config import EngineConfig
from llmjax.engine.clients.client import Control, Deliver, Died, RunningEngine
from llmjax.engine.clients.process import ProcessEngine
from llmjax.engine.clients.restarts import RestartPolicy, Restarts
from llmjax.engine.clients.routing import Router
from llmjax.engine.core.request import EngineOutput, EngineRequest, SequenceTimes
from llmjax.engine.core.stats import EngineTotals, KVStats, RequestStats, StatLogger, StepStats
from llmjax.engine.info import CONTEXTS, EngineInfo, EngineState, ProgramInfo
from llmjax.errors import ConfigError, EngineDead
from llmjax.host_memory import free_memory
from llmjax.machine_share import MachineShare

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Place:
    """The place of one engine, in which one process after another runs it."""

    share: MachineShare
    deaths: Restarts
    engine: ProcessEngine
    serving: bool = True
    restarts: int = 0
    why: str = ""  # it does not serve


class DataParallelEngine(RunningEngine):
    """Engines that divide the machine and the requests.

    A request goes to one engine (`Router`), and so do its aborts; questions go to all. When an engine dies, its
    requests end with ``EngineDead``, the others go on, and another process takes its place. One that dies too often
    ends all.

    Args:
        config: the configuration of every engine; ``data_parallel_size`` says how many there are.
        policy: how often an engine may die.

    Raises:
        LLMJaxError: what an engine raised while it loaded the model; other errors come as they are, too.
    """

    def __init__(self, config: EngineConfig, *, policy: RestartPolicy | None = None) -> None:
        super().__init__()
        self._config = config
        self._lock = threading.Lock()  # guards the router and the places
        self._counting = threading.Lock()  # guards the loggers
        self._deliver: Deliver = _drop
        self._died: Died = _drop
        self._error: BaseException | None = None
        self._exit_status = 0
        self._ending = threading.Event()
        self._coming: list[ProcessEngine] = []  # engines that do not serve yet
        self._threads: list[threading.Thread] = []
        self.totals = EngineTotals()
        self.loggers = [self.totals]
        resolve_model(config)  # here, so that it is fetched once
        count = config.data_parallel_size
        memory = free_memory() // count
        shares = [MachineShare(rank=rank, count=count, host_memory=memory) for rank in range(count)]
        engines = _loaded(config, shares)
        self._places = [
            _Place(share, Restarts(policy or RestartPolicy()), engine)
            for share, engine in zip(shares, engines, strict=True)
        ]
        self.info = info_of_all([engine.info for engine in engines])
        self._router = Router(
            count,
            page_size=self.info.page_size,
            capacity=min(engine.info.kv_tokens for engine in engines) // self.info.page_size
            if config.enable_prefix_caching
            else 0,
        )

    @property
    def states(self) -> tuple[EngineState, ...]:
        with self._lock:
            return tuple(EngineState(serving=place.serving, restarts=place.restarts) for place in self._places)

    def start(self, *, deliver: Deliver, died: Died) -> None:
        self._deliver, self._died = deliver, died
        for place in self._places:
            self._attach(place, place.engine)

    def submit(self, request: EngineRequest) -> int:
        """Queues a request.

        Raises:
            EngineDead: no engine serves.
        """
        with self._lock:
            among = [place.share.rank for place in self._places if place.serving]
            if not among:
                raise EngineDead(self._nobody())
            number = self._router.send(request, among)
            self._places[number].engine.submit(request)
        return number

    def abort(self, request_id: int, index: int | None = None) -> None:
        with self._lock:
            number = self._router.engine_of(request_id)
            if number is not None:
                self._places[number].engine.abort(request_id, index)

    def control(self, control: Control, adapter: AdapterReference | None = None) -> Future[Any]:
        """Asks all engines that serve.

        Returns:
            What ``Control`` says, of all together; an engine that dies meanwhile is left out.
        """
        with self._lock:
            if control is Control.RESET_PREFIX_CACHE:
                self._router.reset_prefixes()
            asked = [place.engine for place in self._places if place.serving]
            nobody = self._nobody()
        return _together(control, [engine.control(control, adapter) for engine in asked], nobody=nobody)

    def check_health(self) -> None:
        """Raises EngineDead if no engine serves. An engine that hangs is noticed here and killed: it then counts as
        dead."""
        if self._error is not None:
            raise EngineDead(f"the engine stopped: {self._error}")
        if self._ending.is_set():
            raise EngineDead("the engine is not running")
        with self._lock:
            serving = [place for place in self._places if place.serving]
            nobody = self._nobody()
        if not serving:
            raise EngineDead(nobody)
        for place in serving:
            try:
                place.engine.check_health()
            except EngineDead as why:
                if place.engine.running:
                    logger.error("%s is killed: %s", place.share.name, why)
                    place.engine.kill()

    def stop(self) -> None:
        with self._lock:
            self._ending.set()
            serving, coming = [place.engine for place in self._places], list(self._coming)
        for engine in serving:
            engine.stop()
        for engine in coming:
            engine.stop()
            engine.kill()  # it listens only when its model is loaded

    def close(self) -> None:
        """Ends all processes, by force those that do not end by themselves in a few seconds."""
        self.stop()
        for engine in self._engines():
            engine.close()
        for thread in list(self._threads):
            thread.join()
        for engine in self._engines():  # one that a thread had just started
            engine.close()

    @property
    def running(self) -> bool:
        going_on = self._error is None and not self._ending.is_set()
        return going_on or any(engine.running for engine in self._engines())

    @property
    def error(self) -> BaseException | None:
        return self._error

    @property
    def exit_status(self) -> int:
        """The exit status of the engine that has died too often."""
        return self._exit_status

    def _engines(self) -> list[ProcessEngine]:
        with self._lock:
            return [*(place.engine for place in self._places), *self._coming]

    def _nobody(self) -> str:
        """The error that says why no request can be taken."""
        why = "; ".join(f"{place.share.name}: {place.why}" for place in self._places if not place.serving)
        return f"no engine serves at the moment ({why})"

    def _attach(self, place: _Place, engine: ProcessEngine) -> None:
        engine.loggers.append(_Numbered(place.share.rank, self.loggers, self._counting))
        engine.start(deliver=self._take, died=lambda error: self._lost(place, engine, error))

    def _take(self, outputs: list[EngineOutput]) -> None:
        """Takes an engine's outputs; runs on the engine's thread."""
        with self._lock:
            self._router.note(outputs)
        self._deliver(outputs)

    def _lost(self, place: _Place, engine: ProcessEngine, error: BaseException) -> None:
        """Handles the death of an engine, on its thread: ends its requests and has another one started."""
        dead = EngineDead(f"{place.share.name} stopped: {error}")
        with self._lock:
            place.serving, place.why = False, str(error)
            lost = self._router.drop(place.share.rank)
            if not self._ending.is_set():
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                thread = threading.Thread(target=self._restart, args=(place, engine, error), daemon=True)
                self._threads.append(thread)
                thread.start()
        if lost:
            self._deliver([_ended(request_id, index, dead) for request_id, index in lost])

    def _restart(self, place: _Place, engine: ProcessEngine, error: BaseException) -> None:
        """Starts processes until the place has an engine again, or its engines have died too often."""
        while (seconds := place.deaths.died(time.monotonic())) is not None:
            engine.close()
            logger.warning("%s is started again in %g s", place.share.name, seconds)
            if self._ending.wait(seconds):
                return
            try:
                engine = ProcessEngine(self._config, place.share)
                self._bring_back(place, engine)
            except Exception as failure:  # whatever it was, the next one may fare better
                if self._ending.is_set():
                    return
                error = failure
                with self._lock:
                    place.why = str(failure)
                logger.error("%s could not be started again: %s", place.share.name, failure)
            else:
                return
        self._give_up(place, engine, error)

    def _bring_back(self, place: _Place, engine: ProcessEngine) -> None:
        """Waits for a process that has just been started, and lets it serve; if that fails, it is ended."""
        with self._lock:
            self._coming.append(engine)
        try:
            self._wait_and_serve(place, engine)
        except BaseException:
            _abandon(engine)
            raise
        finally:
            with self._lock:
                self._coming.remove(engine)

    def _wait_and_serve(self, place: _Place, engine: ProcessEngine) -> None:
        if self._ending.is_set():  # `stop` may have run before this engine was listed
            engine.kill()
        engine.wait_loaded()
        _check_equal(self.info, engine.info, place.share)
        engine.control(Control.WAIT_READY).result()
        self._attach(place, engine)
        with self._lock:
            place.engine = engine
            if engine.running:  # else `_lost` has been called, or will be when it gets the lock
                place.serving = True
                place.restarts += 1
        logger.warning("%s serves again", place.share.name)

    def _give_up(self, place: _Place, engine: ProcessEngine, error: BaseException) -> None:
        """Ends all engines, because one has died too often: the next one would too, and the user should know."""
        with self._lock:
            if self._error is not None or self._ending.is_set():
                return
            self._exit_status = engine.exit_status or 1
            self._error = EngineDead(f"{place.share.name} has died too often, at last: {error}")
            for other in self._places:
                other.serving, other.why = False, str(self._error)
        logger.error("%s", self._error)
        self._died(self._error)
        self.stop()


class _Numbered:
    """Passes an engine's counts on, with its number."""

    def __init__(self, number: int, loggers: list[StatLogger], lock: threading.Lock) -> None:
        self._number = number
        self._loggers = loggers
        self._lock = lock

    def record_step(self, stats: StepStats) -> None:
        numbered = replace(stats, engine=self._number) if self._number else stats
        with self._lock:
            for stat_logger in self._loggers:
                stat_logger.record_step(numbered)

    def record_request(self, stats: RequestStats) -> None: ...

    def record_rejection(self, reason: str) -> None: ...


def info_of_all(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Several engines as one: what they can do together, and what each request can have."""
    first, count = infos[0], len(infos)
    contexts = {}
    for requests in CONTEXTS:
        # As many in one engine as there are when they are spread evenly, or a few more.
        if enough := [n for n in first.longest_contexts if n >= -(-requests // count)]:
            contexts[requests] = min(info.longest_contexts[min(enough)] for info in infos)
    return replace(
        first,
        device=first.device if count == 1 else f"{count} engines: {', '.join(info.device for info in infos)}",
        max_model_len=min(info.max_model_len for info in infos),
        max_num_seqs=sum(info.max_num_seqs for info in infos),
        weight_bytes=sum(info.weight_bytes for info in infos),
        offloaded_bytes=sum(info.offloaded_bytes for info in infos),
        load_seconds=max(info.load_seconds for info in infos),
        kv_bytes=sum(info.kv_bytes for info in infos),
        kv_tokens=sum(info.kv_tokens for info in infos),
        longest_contexts=contexts,
        sampler_bytes=sum(info.sampler_bytes for info in infos),
    )


def _loaded(config: EngineConfig, shares: Sequence[MachineShare]) -> list[ProcessEngine]:
    """Engines that load side by side; if one fails, there is none."""
    engines: list[ProcessEngine] = []
    try:
        for share in shares:
            engines.append(ProcessEngine(config, share))
        wait([engine.loaded for engine in engines], return_when=FIRST_EXCEPTION)
        # The one that failed first: it says why.
        for engine in sorted(engines, key=lambda engine: not engine.loaded.done()):
            engine.wait_loaded()
        for engine, share in zip(engines, shares, strict=True):
            _check_kind(engines[0].info, engine.info, share)
    except BaseException:
        for engine in engines:
            _abandon(engine)
        raise
    return engines


def _check_kind(first: EngineInfo, info: EngineInfo, share: MachineShare) -> None:
    kinds = {re.sub(r"\d+", "", one.device) for one in (first, info)}
    if len(kinds) > 1:
        raise ConfigError(f"{share.name} found {info.device} to run on, engine 0 {first.device}: name the --device")


def _check_equal(known: EngineInfo, info: EngineInfo, share: MachineShare) -> None:
    """Raises EngineDead if an engine cannot take the place of one that was there before."""
    if (known.vocab_size, known.architecture) != (info.vocab_size, info.architecture):
        raise EngineDead(f"{share.name} finds another model than the one that was served: {info.model_path}")
    if info.max_model_len < known.max_model_len:
        raise EngineDead(
            f"{share.name} has memory for contexts of {info.max_model_len} tokens only, not of {known.max_model_len}"
        )


def _abandon(engine: ProcessEngine) -> None:
    """Ends an engine that nobody uses, whatever it is doing."""
    engine.stop()
    engine.kill()
    engine.close()


def _ended(request_id: int, index: int, error: EngineDead) -> EngineOutput:
    return EngineOutput(
        request_id=request_id,
        index=index,
        times=SequenceTimes(arrival=time.monotonic()),
        new_token_ids=[],
        finish_reason="error",
        error=error,
    )


def _together(control: Control, answers: Sequence[Future[Any]], *, nobody: str) -> Future[Any]:
    """One answer made of those of several engines."""
    answer: Future[Any] = Future()
    answer.set_running_or_notify_cancel()
    if not answers:
        answer.set_exception(EngineDead(nobody))
        return answer
    waiting = _Countdown(len(answers))

    def done(_: Future[Any]) -> None:
        if not waiting.count():
            return
        errors = [error for one in answers if (error := one.exception()) is not None]
        grave = [error for error in errors if not isinstance(error, EngineDead)]
        results = [one.result() for one in answers if one.exception() is None]
        if grave or not results:
            answer.set_exception((grave or errors)[0])
        else:
            answer.set_result(_sum(control, results))

    for one in answers:
        one.add_done_callback(done)
    return answer


@dataclass
class _Countdown:
    """Tells the last of several threads that it is the last."""

    left: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self) -> bool:
        with self.lock:
            self.left -= 1
            return not self.left


def _sum(control: Control, results: Sequence[Any]) -> Any:
    match control:
        case Control.KV_STATS:
            names = ("free", "cached", "used", "total")
            return KVStats(**{name: sum(getattr(stats, name) for stats in results) for name in names})
        case Control.PROGRAMS:
            return [_slowest(programs) for programs in zip(*results, strict=False)]
        case _:
            return None


def _slowest(programs: Iterable[ProgramInfo]) -> ProgramInfo:
    """A program that every engine has; ready when it is ready in all."""
    found = list(programs)
    seconds = [program.seconds for program in found if program.seconds is not None]
    return replace(found[0], seconds=max(seconds) if len(seconds) == len(found) else None)


def _drop(_: Any) -> None:
    """Ignores what comes before there is a receiver."""
