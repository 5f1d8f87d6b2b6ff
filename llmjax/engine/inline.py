"""An engine on its user's own thread."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from llmjax.checkpoint.gguf.file import GGUFFile
from llmjax.engine.client import Control, EngineClient
from llmjax.engine.description import info_of, obey
from llmjax.engine.engine import Engine
from llmjax.engine.info import EngineState
from llmjax.engine.request import EngineOutput, EngineRequest


class InlineEngine(EngineClient):
    """An engine that works when its user asks for outputs."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.info = info_of(engine)
        self.totals, self.loggers = engine.totals, engine.loggers

    @property
    def idle(self) -> bool:
        """There will be no outputs before the next request."""
        return self.engine.idle

    @property
    def gguf(self) -> GGUFFile | None:
        return self.engine.model.checkpoint.gguf

    @property
    def states(self) -> tuple[EngineState, ...]:
        return (EngineState(serving=True),)

    def submit(self, request: EngineRequest) -> int:
        self.engine.add(request)
        return 0

    def abort(self, request_id: int, index: int | None = None) -> None:
        """As everywhere, but who calls it is not told of the end again."""
        self.engine.abort(request_id, index)

    def outputs(self) -> list[EngineOutput]:
        """Dispatches a step and returns what the one before brought.

        Raises:
            EngineDead: a process that the engine needs has gone.
        """
        try:
            return self.engine.step()
        except Exception as error:
            if (cause := self.engine.runner.cause(error)) is error:
                raise
            raise cause from error

    def control(self, control: Control) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(obey(self.engine, control))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        self.engine.close()
