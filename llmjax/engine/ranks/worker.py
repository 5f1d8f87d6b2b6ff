"""The worker: the process of a rank other than 0, which has a part of the model and applies the commands of rank 0."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import NoReturn

from llmjax.config import EngineConfig
from llmjax.engine.build import load
from llmjax.engine.clients.wire import Failed, Failure, Leave
from llmjax.engine.device.commands import ProgramName, ReadPages
from llmjax.engine.device.executor import Executor
from llmjax.engine.device.page_moves import PendingPages, page_shapes
from llmjax.engine.programs.cache import Executable
from llmjax.engine.programs.compiler import StepCompiler
from llmjax.engine.programs.threads import CompileThreads
from llmjax.engine.ranks.follower import Follower
from llmjax.engine.ranks.wire import Compile, Compiled, Holds, Pages, PageShape, Refused
from llmjax.errors import EngineDead, LLMJaxError
from llmjax.kernels.cpu.cores import usable_cores
from llmjax.machine_share import WHOLE_MACHINE, MachineShare

logger = logging.getLogger(__name__)


def run_worker(
    config: EngineConfig, share: MachineShare = WHOLE_MACHINE, *, joined: Callable[[], None] = lambda: None
) -> NoReturn:
    """Computes with rank 0 until that ends, and then ends the process, with status 0 if rank 0 has ended as it should.

    Args:
        config: settings of rank 0, but for ``node_rank``.
        share: part of the machine, where the ranks on it divide it.
        joined: called when rank 0 has taken this rank in.

    Raises:
        LLMJaxError: the model cannot be loaded, or rank 0 refuses this rank.
    """
    group = Follower(config)
    joined()
    group.watch(_end_without)
    group.end_with_process()
    try:
        config, compiler = load(config, group, share)
        Worker(compiler, config, group).run()
    except Exception as error:
        group.close()  # why this process ends is known
        with suppress(OSError):  # rank 0 has gone, which may be why
            group.channel.send(Failed(Failure.of(error)))
        raise
    logger.info("rank 0 has ended")
    _end(0)


def _end_without(error: LLMJaxError) -> None:
    """Ends the process because its group has ended, whatever it computes or waits for."""
    logger.error("%s", error)
    _end(1)


def _end(status: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads may be inside XLA, and the other processes are ending, too


class Worker:
    """Receives what rank 0 sends, and has the executor of this rank apply it.

    Args:
        compiler: compiles this rank's programs.
        config: the configuration with which the model was loaded.
        group: the connection to rank 0.
    """

    def __init__(self, compiler: StepCompiler, config: EngineConfig, group: Follower) -> None:
        self._group = group
        self._threads = CompileThreads(config.compile_threads or usable_cores())
        self._executor = Executor(compiler, config, group=group, threads=self._threads)
        self._reader = CompileThreads(1)  # waits for pages that are being read
        if config.moves_pages:
            group.channel.send(Holds(_page_shapes(compiler)))

    def run(self) -> None:
        """Returns when rank 0 has ended as it should.

        Raises:
            EngineDead: it has gone without a word, or refuses this rank.
        """
        for message in self._group.messages:
            match message:
                case Compile():
                    compiling = self._threads.submit(self._executor.compile, message.program)
                    compiling.add_done_callback(partial(self._report, message.program))
                case ReadPages():
                    self._reader.submit(self._answer, message.number, self._executor.apply(message))
                case Refused():
                    raise EngineDead(message.reason)
                case Leave():
                    return
                case _:
                    self._executor.apply(message)
        raise EngineDead("rank 0 has gone")

    def _answer(self, number: int, pages: PendingPages) -> None:
        self._group.channel.send(Pages(number, pages.arrays()))

    def _report(self, program: ProgramName, compiling: Future[Executable]) -> None:
        if not compiling.cancelled():
            error = compiling.exception()
            self._group.channel.send(Compiled(program, None if error is None else Failure.of(error)))


def _page_shapes(compiler: StepCompiler) -> list[list[PageShape]]:
    """Shapes of the parts of a page that this rank has, by group of layers."""
    groups = range(len(compiler.kv_plan.groups))
    return [[PageShape(shape.shape, shape.dtype.name) for shape in page_shapes(compiler, group)] for group in groups]
