"""The inbox for requests from another process: compiles their grammars on a thread, then hands them to the loop."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property

from llmjax.config import EngineConfig
from llmjax.constraints.compiler import GrammarCompiler
from llmjax.engine.clients.loop import Abort, EngineLoop
from llmjax.engine.core.request import EngineRequest
from llmjax.engine.info import EngineInfo
from llmjax.engine.setup import tokenizer_of
from llmjax.errors import LLMJaxError

logger = logging.getLogger(__name__)


class Inbox:
    """Hands requests to a loop, those with a grammar by way of a thread. Belongs to the thread that receives messages.

    Args:
        config, info: the engine's.
    """

    def __init__(self, loop: EngineLoop, config: EngineConfig, info: EngineInfo) -> None:
        self.loop = loop
        self._config = config
        self._info = info
        self._on_the_way: dict[int, Future[None]] = {}

    def submit(self, request: EngineRequest) -> None:
        if request.grammar is None:
            self.loop.send(request)
            return
        self._on_the_way = {id: future for id, future in self._on_the_way.items() if not future.done()}
        self._on_the_way[request.request_id] = self._thread.submit(self._add_matcher, request)

    def abort(self, abort: Abort) -> None:
        """Comes to the loop after the request, if that is on its way."""
        if (future := self._on_the_way.get(abort.request_id)) is None:
            self.loop.send(abort)
        else:
            future.add_done_callback(lambda _: self.loop.send(abort))

    def _add_matcher(self, request: EngineRequest) -> None:
        assert request.grammar is not None
        try:
            matcher = self._grammars.matcher(request.grammar)
        except Exception as error:
            # The other process has checked it. The loop says to whoever waits for the request that it has failed.
            if not isinstance(error, LLMJaxError):
                logger.exception("a grammar could not be compiled")
            self.loop.send(request)
        else:
            self.loop.send(replace(request, matcher=matcher))

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        tokenizer = tokenizer_of(self._config, self._info.model_path)
        if tokenizer is None:
            raise LLMJaxError("there is no tokenizer")
        eos = self._info.eos_token_ids | tokenizer.eos_token_ids
        return GrammarCompiler(tokenizer, vocab_size=self._info.vocab_size, eos_token_ids=eos)
