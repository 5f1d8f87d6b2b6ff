"""Engines that run by themselves, for a user's thread that waits for their outputs."""

from __future__ import annotations

import queue
from concurrent.futures import Future
from typing import Any

from llmjax.adapters.reference import AdapterReference
from llmjax.engine.clients.client import Control, EngineClient, RunningEngine
from llmjax.engine.core.request import EngineOutput, EngineRequest
from llmjax.engine.info import EngineInfo, EngineState
from llmjax.errors import EngineDead


class WaitedEngine(EngineClient):
    """An engine, or several, used like ``InlineEngine`` from one thread, although the work is done elsewhere.

    Args:
        engine: the engine, which has not been started; it may be loading its model.
    """

    def __init__(self, engine: RunningEngine) -> None:
        super().__init__()
        self._engine = engine
        self.totals, self.loggers = engine.totals, engine.loggers
        self._open: dict[int, set[int]] = {}  # continuations of requests that have not ended
        self._brought: queue.SimpleQueue[list[EngineOutput] | BaseException] = queue.SimpleQueue()
        engine.start(deliver=self._brought.put, died=self._brought.put)

    def located(self) -> str:
        return self._engine.located()

    def wait_loaded(self) -> EngineInfo:
        self.info = self._engine.wait_loaded()
        return self.info

    @property
    def idle(self) -> bool:
        """Whether there will be no outputs before the next request."""
        return not self._open

    @property
    def states(self) -> tuple[EngineState, ...]:
        return self._engine.states

    def submit(self, request: EngineRequest) -> int:
        number = self._engine.submit(request)
        self._open[request.request_id] = set(range(request.params.n))
        return number

    def abort(self, request_id: int, index: int | None = None) -> None:
        """Ends a request, as in every client, except that no output reports the end to the caller."""
        self._engine.abort(request_id, index)
        self._end(request_id, index)

    def outputs(self) -> list[EngineOutput]:
        """Waits for the next outputs.

        Raises:
            EngineDead: none will come.
        """
        brought = self._brought.get()
        if isinstance(brought, BaseException):
            self._open.clear()
            raise EngineDead(f"the engine stopped: {brought}") from brought
        for output in brought:
            if output.finish_reason is not None:
                self._end(output.request_id, output.index)
        return brought

    def control(self, control: Control, adapter: AdapterReference | None = None) -> Future[Any]:
        return self._engine.control(control, adapter)

    def close(self) -> None:
        self._engine.close()

    def _end(self, request_id: int, index: int | None) -> None:
        left = self._open.get(request_id, set())
        left.discard(index) if index is not None else left.clear()
        if not left:
            self._open.pop(request_id, None)
