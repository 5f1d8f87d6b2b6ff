"""The engine on a thread of its own, reached by messages only, so that it could as well be a process."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from llmjax.engine.engine import Engine
from llmjax.engine.request import EngineOutput, EngineRequest, SequenceTimes
from llmjax.errors import EngineDead, GenerationFailed, LLMJaxError

logger = logging.getLogger(__name__)

STUCK_AFTER = 120.0  # seconds in one step; the longest compilation must fit


@dataclass(frozen=True)
class Abort:
    """Ends a request, or one continuation of it."""

    request_id: str
    index: int | None = None


@dataclass(frozen=True)
class Stop:
    """Ends the loop after the messages before it."""


Message = EngineRequest | Abort | Stop


class EngineLoop:
    """Runs ``Engine.step`` while there is work.

    Args:
        engine: used by this thread alone from ``start`` on.
        deliver: receives outputs, on the engine's thread; must not block.
        died: called once if the loop ends by an error.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        deliver: Callable[[list[EngineOutput]], None],
        died: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._died = died
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        self._inbox.put(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._inbox.put(Abort(request_id, index))

    def check_health(self) -> None:
        """Raises EngineDead if the loop has ended or hangs in a step."""
        if self._error is not None:
            raise EngineDead(f"the engine stopped: {self._error}")
        if not self._thread.is_alive():
            raise EngineDead("the engine is not running")
        since = self._busy_since
        if since is not None and time.monotonic() - since > STUCK_AFTER:
            raise EngineDead(f"the engine has been in one step for more than {STUCK_AFTER:.0f} s")

    def stop(self) -> None:
        """Ends the loop after the messages before; it runs until the step that it is in is done."""
        self._inbox.put(Stop())

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._handle_messages():
                self._busy_since = time.monotonic()
                if outputs := self._engine.step():
                    self._deliver(outputs)
                self._busy_since = None
        except Exception as error:
            # A deliberate error says in its line what is wrong.
            logger.error("the engine stopped: %s", error, exc_info=not isinstance(error, LLMJaxError))
            self._error = error
            self._died(error)

    def _handle_messages(self) -> bool:
        """Takes every message that is there, waiting for one if there is nothing else to do."""
        while True:
            try:
                message = self._inbox.get(block=self._engine.idle)
            except queue.Empty:
                return True
            match message:
                case Stop():
                    return False
                case Abort():
                    if outputs := self._engine.abort(message.request_id, message.index):
                        self._deliver(outputs)
                case EngineRequest():
                    self._add(message)

    def _add(self, request: EngineRequest) -> None:
        try:
            self._engine.add(request)
        except Exception as failure:
            # One request's error is its own; the loop goes on.
            if isinstance(failure, LLMJaxError):
                error = failure
            else:
                logger.exception("a request could not be started")
                error = GenerationFailed(f"internal error: {failure}")
            failed = [
                EngineOutput(
                    request_id=request.request_id,
                    index=index,
                    times=SequenceTimes(arrival=request.arrival_time),
                    new_token_ids=[],
                    finish_reason="error",
                    error=error,
                )
                for index in range(request.params.n)
            ]
            self._deliver(failed)
