"""A process that computes with rank 0: it has its devices' part of the model, and runs what rank 0 runs."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import jax
import numpy as np
import numpy.typing as npt

from llmjax.config import EngineConfig
from llmjax.engine.build import load
from llmjax.engine.clients.wire import Failed, Failure, Leave
from llmjax.engine.device.batch import Bucket
from llmjax.engine.device.device_state import StepOutput
from llmjax.engine.device.page_moves import PageMover, PendingPages, from_bytes, page_shapes
from llmjax.engine.device.rows import RowState
from llmjax.engine.device.slots import SLOT_EDITS, TABLE_EDITS, Editor
from llmjax.engine.programs.cache import Executable
from llmjax.engine.programs.compiler import StepCompiler
from llmjax.engine.programs.threads import CompileThreads
from llmjax.engine.ranks.group import Follower
from llmjax.engine.ranks.wire import (
    Array,
    Compile,
    Compiled,
    Hidden,
    Holds,
    Pages,
    PageShape,
    Program,
    ReadPages,
    Refused,
    RunEdit,
    RunMasked,
    RunStep,
    Taken,
    WritePages,
)
from llmjax.errors import EngineDead, LLMJaxError
from llmjax.host_memory import keep_freed_blocks
from llmjax.kernels.cpu.cores import usable_cores
from llmjax.machine_share import WHOLE_MACHINE, MachineShare

logger = logging.getLogger(__name__)


def follow(
    config: EngineConfig, share: MachineShare = WHOLE_MACHINE, *, joined: Callable[[], None] = lambda: None
) -> NoReturn:
    """Computes with rank 0 until it ends, and then ends the process: with status 0 if it was told to.

    Args:
        config: that of rank 0, but for ``node_rank``.
        share: of the machine, where the ranks on it divide it.
        joined: called when rank 0 has taken it in.

    Raises:
        LLMJaxError: the model cannot be loaded, or rank 0 does not want this rank.
    """
    group = Follower(config)
    joined()
    group.watch(_end_without)
    group.end_with_process()
    try:
        config, compiler = load(config, group, share)
        threads = config.compile_threads or usable_cores()
        Replica(compiler, threads=threads, moves_pages=config.moves_pages).run()
    except Exception as error:
        group.close()  # what ends this process is known
        with suppress(OSError):  # it has gone, which may be why
            group.channel.send(Failed(Failure.of(error)))
        raise
    logger.info("rank 0 has ended")
    _end(0)


def _end_without(error: LLMJaxError) -> None:
    """Ends the process as its group ends, whatever it computes or waits for."""
    logger.error("%s", error)
    _end(1)


def _end(status: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads may be inside XLA, and the other processes are ending, too


class Replica:
    """The state of this process's devices, changed as rank 0 changes that of its own.

    Args:
        compiler: of this rank's programs.
        threads: compilations at once.
        moves_pages: pages will be read and written.
    """

    def __init__(self, compiler: StepCompiler, *, threads: int, moves_pages: bool = False) -> None:
        assert isinstance(compiler.group, Follower)
        self._group = compiler.group
        self._compiler = compiler
        self._weights = compiler.weights
        self._state = compiler.make_state()
        self._output: StepOutput | None = None
        self._threads = CompileThreads(threads)
        self._programs: dict[Program, Future[Executable]] = {}
        where: dict[str, Any] = {"cache": compiler.cache, "sharding": compiler.platform.sharding}
        self._slots = Editor(self._state.sampler, **where)
        self._tables = Editor(self._state.rows.page_tables, **where)
        self._edits: dict[str, Executable] = {}
        self._mover: Future[PageMover] | None = None
        if moves_pages:
            self._mover = self._threads.submit(PageMover(compiler).compiled)
            groups = range(len(compiler.kv_plan.groups))
            self._shapes = [
                [PageShape(shape.shape, shape.dtype.name) for shape in page_shapes(compiler, group)] for group in groups
            ]
            self._group.channel.send(Holds(self._shapes))
        self._reader = CompileThreads(1)  # waits for what is read out
        self._hidden: deque[bytes] = deque()  # of the stage before this one
        self._later: deque[Any] = deque()  # messages that came before those
        if compiler.platform.is_cpu:
            keep_freed_blocks()

    def run(self) -> None:
        """Returns when rank 0 has ended as it should.

        Raises:
            EngineDead: it has gone without a word, or will not have this rank.
        """
        while (message := self._later.popleft() if self._later else next(self._group.messages, None)) is not None:
            match message:
                case Compile():
                    self._compile(message.program)
                case RunStep() if self._compiler.is_staged:
                    self._pass_on(message)
                case Hidden():
                    self._hidden.append(message.data)
                case Taken():
                    self._state = replace(self._state, rows=self._after(message))
                case RunStep():
                    run = self._programs[Program("step", message.bucket)].result()
                    self._state, self._output = run(self._weights, self._state, message.packed.values())
                case RunMasked():
                    assert self._output is not None
                    run = self._programs[_shape(Program("masked", message.bucket))].result()
                    ends, mask = self._output.ends, message.mask.values()
                    state, _ = run(self._compiler.head_weights, self._state.without_layers, ends, mask)
                    self._state = state.with_layers(self._state)
                case RunEdit():
                    self._edit(message)
                case ReadPages():
                    assert self._mover is not None
                    read = self._mover.result().read(self._state.kv, message.group, message.pages)
                    self._reader.submit(self._give, message.number, read)
                case WritePages():
                    self._write(message)
                case Refused():
                    raise EngineDead(message.reason)
                case Leave():
                    return
        raise EngineDead("rank 0 has gone")

    def _pass_on(self, message: RunStep) -> None:
        """Runs this stage's layers, and gives what they make of the tokens to the next one."""
        run = self._programs[Program("step", message.bucket)].result()
        before = () if self._compiler.model.graph.config.embeds else (self._before(message.bucket),)
        self._state, hidden = run(self._weights, self._state, message.packed.values(), *before)
        self._group.channel.send(Hidden(np.asarray(hidden).tobytes()))

    def _before(self, bucket: Bucket) -> npt.NDArray[Any]:
        """What the stage before has made of the tokens of a step; what else comes meanwhile is for later.

        Raises:
            EngineDead: rank 0 has gone.
        """
        while not self._hidden:
            message = next(self._group.messages, None)
            if message is None:
                raise EngineDead("rank 0 has gone")
            if isinstance(message, Hidden):
                self._hidden.append(message.data)
            elif isinstance(message, Compile):  # rank 0 waits for it
                self._compile(message.program)
            else:
                self._later.append(message)
        shape = self._compiler.hidden(bucket)
        return np.frombuffer(self._hidden.popleft(), shape.dtype).reshape(shape.shape)

    def _after(self, taken: Taken) -> RowState:
        """The rows with what those have sampled that took part in the step before."""
        rows, slot = self._state.rows, taken.slot.values()
        padded = np.full(rows.length.shape, rows.length.shape[0], np.int32)
        padded[: len(slot)] = slot

        def with_new(old: jax.Array, new: Array) -> jax.Array:
            values = np.zeros(old.shape, np.int32)
            values[: len(slot)] = new.values()
            return old.at[padded].set(values, mode="drop")

        return replace(
            rows,
            last_token=with_new(rows.last_token, taken.last_token),
            length=with_new(rows.length, taken.length),
        )

    def _give(self, number: int, read: PendingPages) -> None:
        self._group.channel.send(Pages(number, [array.tobytes() for array in read.arrays()]))

    def _write(self, message: WritePages) -> None:
        assert self._mover is not None
        values = from_bytes(message.arrays, self._shapes[message.group], count=len(message.pages))
        kv = self._mover.result().write(self._state.kv, message.group, message.pages, values)
        self._state = replace(self._state, kv=kv)

    def _compile(self, program: Program) -> None:
        shape = _shape(program)
        if shape not in self._programs:
            build = {"step": self._compiler.compile, "masked": self._compiler.compile_masked}[program.kind]
            self._programs[shape] = self._threads.submit(build, program.bucket)
        self._programs[shape].add_done_callback(lambda future: self._report(program, future))

    def _report(self, program: Program, future: Future[Executable]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        self._group.channel.send(Compiled(program, None if error is None else Failure.of(error)))

    def _edit(self, message: RunEdit) -> None:
        name, arguments = message.name, [argument.values() for argument in message.arguments]
        rows, sampler = self._state.rows, self._state.sampler
        if name in TABLE_EDITS:
            run = self._edits.get(name) or self._tables.program(TABLE_EDITS[name], *arguments)
            tables = run(rows.page_tables, *arguments)
            self._state = replace(self._state, rows=replace(rows, page_tables=tables))
        else:
            run = self._edits.get(name) or self._slots.program(SLOT_EDITS[name], *arguments)
            self._state = replace(self._state, sampler=run(sampler, *arguments))
        self._edits[name] = run


def _shape(program: Program) -> Program:
    """What two programs have alike that are one: what samples under masks sees rows alone."""
    if program.kind == "step":
        return program
    return Program(program.kind, Bucket(tokens=0, rows=program.bucket.rows, decode=program.bucket.decode))
