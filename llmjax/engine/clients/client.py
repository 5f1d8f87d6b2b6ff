"""The interface of engines to the rest of llmjax: ``InlineEngine`` works on the caller's thread, ``ThreadEngine`` on
its own thread, ``ProcessEngine`` in its own process; ``DataParallelEngine`` is several of the latter."""

from __future__ import annotations

import enum
import itertools
import logging
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

from llmjax.adapters.reference import AdapterReference
from llmjax.engine.core.request import EngineOutput, EngineRequest
from llmjax.engine.core.stats import EngineTotals, StatLogger
from llmjax.engine.info import EngineInfo, EngineState
from llmjax.errors import EngineDead

if TYPE_CHECKING:
    from llmjax.checkpoint.gguf.file import GGUFFile

STUCK_AFTER = 120.0  # seconds without an answer; the longest compilation must fit into a step
SHOWN_AFTER = 0.75  # share of them after which the log shows where each thread stands

log = logging.getLogger(__name__)

Deliver = Callable[[list[EngineOutput]], None]
Died = Callable[[BaseException], None]


class Control(enum.Enum):
    """What an engine can be asked for besides requests."""

    PING = "ping"  # → None, between two steps
    PROGRAMS = "programs"  # → list[ProgramInfo]
    KV_STATS = "kv_stats"  # → KVStats
    RESET_PREFIX_CACHE = "reset_prefix_cache"  # → None: requests from now on find nothing computed before
    WAIT_READY = "wait_ready"  # → None, when requests can be computed without waiting for the compiler
    WARM_UP = "warm_up"  # → None, when every program is compiled
    SLEEP = "sleep"  # → None: the device's memory is free, and the weights are in the host's
    SLEEP_DEEPLY = "sleep_deeply"  # → None: the weights' is free, too
    WAKE_WEIGHTS = "wake_weights"  # → None, when they are back
    WAKE_KV_CACHE = "wake_kv_cache"  # → None, when it is there again
    FREEZE = "freeze"  # → None: no step begins, and requests stay as they are
    GO_ON = "go_on"  # → None: steps begin again
    START_PROFILE = "start_profile"  # → None: what is computed from now on is written down, in ``profile_dir``
    LOAD_ADAPTER = "load_adapter"  # an adapter → None, when it is in host memory and is known to fit the model
    STOP_PROFILE = "stop_profile"  # → None, when it has been written

    @property
    def waits(self) -> bool:
        """Whether it takes long and changes nothing, so that steps continue meanwhile."""
        return self in (Control.WAIT_READY, Control.WARM_UP, Control.LOAD_ADAPTER)


class EngineClient(ABC):
    """One engine as its users see it, or several that are used as one.

    Attributes:
        info: describes the engine.
        totals: counts since the start.
        loggers: receivers of each step's counts, ``totals`` first; users record requests and rejections there.
        in_process: whether the engine is in its user's process.
    """

    in_process: ClassVar[bool] = False

    info: EngineInfo
    totals: EngineTotals
    loggers: list[StatLogger]

    def __init__(self) -> None:
        self._ids = itertools.count()

    def new_id(self) -> int:
        """An id for a request; no two are equal."""
        return next(self._ids)

    def located(self) -> str:
        """The model's folder or file on this machine; waits until that is known."""
        return self.info.model_path

    def wait_loaded(self) -> EngineInfo:
        """``info``, when the model is there; raises why it is not."""
        return self.info

    @property
    def gguf(self) -> GGUFFile | None:
        """The model's GGUF file, if it is one and this process has opened it."""
        return None

    @property
    @abstractmethod
    def states(self) -> tuple[EngineState, ...]:
        """The state of each engine, by its number: one, or several that are used as one."""

    @abstractmethod
    def submit(self, request: EngineRequest) -> int:
        """Queues a request that has been checked; its outputs come as the engine's kind says.

        Returns:
            The number of the engine that it goes to.
        """

    @abstractmethod
    def abort(self, request_id: int, index: int | None = None) -> None:
        """Ends a request, or one of its continuations. Unknown ids are ignored: it may have just finished."""

    @abstractmethod
    def control(self, control: Control, adapter: AdapterReference | None = None) -> Future[Any]:
        """Asks for something else.

        Args:
            adapter: the adapter that it is about, where it is about one.

        Returns:
            What ``Control`` says, or the error that came of it.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the engine; a second call does nothing."""


class RunningEngine(EngineClient):
    """An engine that works by itself and delivers its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self._ping: Future[Any] | None = None
        self._pinged = 0.0
        self._shown = False

    @abstractmethod
    def start(self, *, deliver: Deliver, died: Died) -> None:
        """Begins to work.

        Args:
            deliver: receives outputs, on another thread; must not block.
            died: called once, on another thread, if the engine ends by an error.
        """

    @property
    def states(self) -> tuple[EngineState, ...]:
        return (EngineState(serving=self.running),)

    @abstractmethod
    def stop(self) -> None:
        """Ends the engine after what it has been told before; ``running`` says when it has ended."""

    @property
    @abstractmethod
    def running(self) -> bool: ...

    @property
    @abstractmethod
    def error(self) -> BaseException | None:
        """The error that ended the engine."""

    @property
    def exit_status(self) -> int:
        """What a process that cannot do without the engine should end with: 0 unless ``error`` is there."""
        return 0 if self.error is None else 1

    def check_health(self) -> None:
        """Raises EngineDead if the engine has ended, or has not answered for ``STUCK_AFTER`` seconds.

        The engine is asked by this call, so one that hangs is only noticed by calls that are repeated. Some time before
        the error is raised, the log shows where the engine's threads stand.
        """
        if self.error is not None:
            raise EngineDead(f"the engine stopped: {self.error}")
        if not self.running:
            raise EngineDead("the engine is not running")
        if self._ping is None or self._ping.done():
            self._pinged, self._ping, self._shown = time.monotonic(), self.control(Control.PING), False
            return
        seconds = time.monotonic() - self._pinged
        if seconds > SHOWN_AFTER * STUCK_AFTER and not self._shown:  # before anybody ends it for that
            self._shown = True
            log.error("the engine has been in one step for %.0f s; its threads are shown", seconds)
            self._show_stacks()
        if seconds > STUCK_AFTER:
            raise EngineDead(f"the engine has been in one step for more than {STUCK_AFTER:.0f} s")

    def _show_stacks(self) -> None:
        """Writes to the log where each thread of the engine's process stands."""
        log_stacks()


def log_stacks() -> None:
    """Writes to the log where each thread of this process stands."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for number, frame in sys._current_frames().items():
        log.error("thread %s:\n%s", names.get(number, number), "".join(traceback.format_stack(frame)).rstrip())
