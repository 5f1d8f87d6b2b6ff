"""The loop that runs an engine and takes only messages: on a thread here, or in a process with ``process_main``."""

from __future__ import annotations

import logging
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from llmjax.adapters.reference import AdapterReference
from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.engine.clients.client import Control, Deliver, Died, RunningEngine
from llmjax.engine.core.request import EngineOutput, EngineRequest, SequenceTimes
from llmjax.engine.description import info_of, obey
from llmjax.engine.loaded import LoadedEngine
from llmjax.errors import EngineDead, GenerationFailed, LLMJaxError

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 5.0  # how long the thread of an engine that has died may take to end by itself


@dataclass(frozen=True)
class Abort:
    """Ends a request, or one continuation of it."""

    request_id: int
    index: int | None = None


@dataclass(frozen=True)
class Ask:
    """Wants an answer, between two steps."""

    control: Control
    adapter: AdapterReference | None = None
    answer: Future[Any] = field(default_factory=Future)


@dataclass(frozen=True)
class Stop:
    """Ends the loop after the messages before it."""


@dataclass(frozen=True)
class Fault:
    """Ends the loop with an error: another process that the engine needs has gone."""

    error: LLMJaxError


Message = EngineRequest | Abort | Ask | Stop | Fault


class EngineLoop:
    """Runs ``Engine.step`` while there is work.

    Args:
        engine: used by the thread that calls ``run`` alone, from then on.
    """

    def __init__(self, engine: LoadedEngine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._deliver: Deliver = _drop

    def send(self, message: EngineRequest | Abort | Stop | Fault) -> None:
        """Sends the loop a message. Any thread may call this."""
        self._inbox.put(message)

    def ask(self, control: Control, adapter: AdapterReference | None = None) -> Future[Any]:
        """Asks the loop for something. Any thread may call this, even if the loop has not begun or has ended, but then
        the answer may not come."""
        ask = Ask(control, adapter)
        if control.waits:
            # A daemon: nobody who ends waits for the compiler.
            threading.Thread(target=_answer, args=(self._engine, ask), name="engine-wait", daemon=True).start()
        else:
            self._inbox.put(ask)
        return ask.answer

    def run(self, deliver: Deliver) -> None:
        """Works until it is told to stop.

        Args:
            deliver: receives the outputs of each step, which may be none; must not block.

        Raises:
            Exception: what a step raised.
        """
        self._deliver = deliver
        try:
            while self._handle_messages():
                deliver(self._engine.step())
            self._engine.keep()
        except Exception as error:
            if (cause := self._engine.runner.cause(error)) is error:
                raise
            raise cause from error
        finally:
            self.refuse()

    def refuse(self) -> None:
        """Answers with an error the questions that the loop will not answer any more."""
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, Ask) and message.answer.set_running_or_notify_cancel():
                message.answer.set_exception(EngineDead("the engine is not running"))

    def _handle_messages(self) -> bool:
        """Handles every message that is there, and waits for one if there is nothing else to do."""
        while True:
            try:
                message = self._inbox.get(block=self._engine.idle)
            except queue.Empty:
                return True
            match message:
                case Stop():
                    return False
                case Fault():
                    raise message.error
                case Ask():
                    _answer(self._engine, message)
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


class ThreadEngine(RunningEngine):
    """An engine on a thread of this process."""

    in_process = True

    def __init__(self, engine: LoadedEngine) -> None:
        super().__init__()
        self.engine = engine
        self.info = info_of(engine)
        self.totals, self.loggers = engine.totals, engine.loggers
        self._loop = EngineLoop(engine)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._end = threading.Lock()

    @property
    def gguf(self) -> GGUFFile | None:
        return self.engine.model.checkpoint.gguf

    def start(self, *, deliver: Deliver, died: Died) -> None:
        self._thread = threading.Thread(target=self._run, args=(deliver, died), name="engine", daemon=True)
        self._thread.start()

        def lost(error: LLMJaxError) -> None:
            self._loop.send(Fault(error))
            self._die(error, died)  # the thread may wait for devices that wait for the process that has gone

        self.engine.runner.watch(lost)

    def submit(self, request: EngineRequest) -> int:
        self._loop.send(request)
        return 0

    def abort(self, request_id: int, index: int | None = None) -> None:
        self._loop.send(Abort(request_id, index))

    def control(self, control: Control, adapter: AdapterReference | None = None) -> Future[Any]:
        answer = self._loop.ask(control, adapter)
        if not self.running:  # it may have ended before it could see the question
            self._loop.refuse()
        return answer

    def stop(self) -> None:
        self._loop.send(Stop())

    def close(self) -> None:
        """Ends the thread and its compilers; compilations that have begun are not waited for."""
        hangs = False
        if self._thread is not None:
            self.stop()
            self._thread.join(None if self._error is None else LEAVE_SECONDS)
            hangs = self._thread.is_alive()
        try:
            self.engine.close(wait=False, lost=hangs)
        except Exception:
            if self._error is None:  # otherwise the device raises the engine's error again
                raise

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self._error is None

    @property
    def error(self) -> BaseException | None:
        return self._error

    def _run(self, deliver: Deliver, died: Died) -> None:
        try:
            self._loop.run(lambda outputs: deliver(outputs) if outputs else None)
        except Exception as error:
            self._die(error, died)

    def _die(self, error: Exception, died: Died) -> None:
        """Notes the error that ended the engine; only the first call has an effect."""
        with self._end:
            if self._error is not None:
                return
            self._error = error
        log_end(error)
        died(error)


def log_end(error: Exception) -> None:
    """Logs the error that ended an engine, with a traceback unless it is one of llmjax's own errors."""
    logger.error("the engine stopped: %s", error, exc_info=not isinstance(error, LLMJaxError))


def _answer(engine: LoadedEngine, ask: Ask) -> None:
    if not ask.answer.set_running_or_notify_cancel():
        return
    try:
        ask.answer.set_result(obey(engine, ask.control, ask.adapter))
    except Exception as error:
        ask.answer.set_exception(error)


def _drop(outputs: list[EngineOutput]) -> None:
    """Ignores what comes before there is a receiver."""
