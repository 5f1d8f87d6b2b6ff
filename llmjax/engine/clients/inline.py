"""An engine that runs on its user's thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import Any

from llmjax.adapters.reference import AdapterReference
from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.engine.clients.client import Control, EngineClient
from llmjax.engine.core.request import EngineOutput, EngineRequest
from llmjax.engine.description import info_of, obey
from llmjax.engine.info import EngineState
from llmjax.engine.loaded import LoadedEngine
from llmjax.errors import EngineDead


class InlineEngine(EngineClient):
    """An engine that works when its user asks for outputs. A step that fails is its last one: it may have destroyed the
    state on the device, and the prefix cache lists pages that the step should have computed."""

    in_process = True

    def __init__(self, engine: LoadedEngine) -> None:
        super().__init__()
        self.engine = engine
        self.info = info_of(engine)
        self._error: Exception | None = None  # the error of the step that failed
        self.totals, self.loggers = engine.totals, engine.loggers

    @property
    def idle(self) -> bool:
        """Whether there will be no outputs before the next request."""
        return self._error is not None or self.engine.idle

    @property
    def gguf(self) -> GGUFFile | None:
        return self.engine.model.checkpoint.gguf

    @property
    def states(self) -> tuple[EngineState, ...]:
        return (EngineState(serving=self._error is None),)

    def submit(self, request: EngineRequest) -> int:
        """Adds a request, as in every client.

        Raises:
            EngineDead: a step has failed.
        """
        if self._error is not None:
            raise EngineDead(f"the engine stopped: {self._error}") from self._error
        with _uninterrupted():
            self.engine.add(request)
        return 0

    def abort(self, request_id: int, index: int | None = None) -> None:
        """Ends a request, as in every client, except that no output reports the end to the caller."""
        if self._error is not None:
            return
        with _uninterrupted():
            self.engine.abort(request_id, index)

    def outputs(self) -> list[EngineOutput]:
        """Dispatches a step and returns the outputs of the one before.

        Raises:
            EngineDead: a process that the engine needs has gone.
        """
        try:
            with _uninterrupted():
                return self.engine.step()
        except Exception as error:
            self._error = cause = self.engine.runner.cause(error)
            if cause is error:
                raise
            raise cause from error

    def control(self, control: Control, adapter: AdapterReference | None = None) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(obey(self.engine, control, adapter))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        self.engine.close()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Has Ctrl-C wait for the end of the block: in the middle of a step the state on the device is not valid, and the
    prefix cache lists pages that are still to be computed. A second Ctrl-C does not wait."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        came.append(frame)
        signal.signal(number, handler)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        handler(signal.SIGINT, came[0])
