"""Compiles programs in another process while an engine serves: tracing would hold the interpreter of the engine."""

from __future__ import annotations

import io
import json
import logging
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import jax

from llmjax import jax_settings
from llmjax.engine.clients.process import how_it_ended, python_environment, signals_held_back
from llmjax.engine.device.batch import Bucket
from llmjax.engine.programs.cache import ProgramCache, ProgramSpec
from llmjax.engine.programs.compiler import StepCompiler
from llmjax.engine.programs.step_programs import in_turn
from llmjax.errors import CompileError

logger = logging.getLogger(__name__)

FIRST = 2  # programs that an engine compiles itself, in the order of ``in_turn``
WORTH_A_PROCESS = 100  # layers in all programs; importing JAX and Flax takes as long as compiling some dozens
MASKED = "masked"  # the name of the program that samples under masks after the largest step


@dataclass(frozen=True)
class Environment:
    """The settings that let the process compile the same programs as its parent; sent before all specifications.

    Attributes:
        settings: JAX's settings.
        folder: where programs are kept; its name is a digest of the environment.
    """

    settings: Mapping[str, Any]
    folder: Path


class CompileProcess:
    """Compiles programs at low priority and keeps them where the engine finds them. It ends with this process.

    Args:
        cache: keeps the programs.
        specs: specifications of the programs, by name, in the order in which they are wanted; for one CPU device.

    Attributes:
        programs: futures by name, done when the program can be read, or with the reason why it cannot.

    Raises:
        OSError: the process cannot be started.
        PicklingError: something in a specification cannot be sent to another process.
    """

    def __init__(self, cache: ProgramCache, specs: Mapping[Hashable, ProgramSpec]) -> None:
        assert cache.folder is not None
        self.programs: dict[Hashable, Future[None]] = {name: Future() for name in specs}
        message = io.BytesIO()
        pickle.dump(Environment(jax_settings.of_programs(), cache.folder), message)  # settings as this thread has them
        _Pickler(message).dump([(cache.signature(spec), spec) for spec in specs.values()])
        command = [sys.executable, "-m", "llmjax.engine.programs.process_main"]
        pipe = subprocess.PIPE
        with signals_held_back():
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=python_environment())
        self._end = weakref.finalize(self, _end, self._process, list(self.programs.values()))  # at exit, too
        conversation = (self._process, message.getvalue(), list(self.programs.values()))
        threading.Thread(target=_converse, args=conversation, name="compile-process", daemon=True).start()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def close(self) -> None:
        """Ends the process, whatever it does; programs that it has not compiled are cancelled."""
        self._end()


def compile_apart(compiler: StepCompiler, *, kept: Collection[Bucket]) -> CompileProcess | None:
    """Starts a process that compiles the programs that an engine does not need in order to serve: all but the step that
    holds every plan, and the one that decodes a single stream.

    Args:
        kept: buckets whose programs need only to be read.

    Returns:
        The process, or None if too little is left to compile for one to be worth its start, if it could not keep
        programs anywhere, or if several devices, several processes or an accelerator run the model.
    """
    rest = [bucket for bucket in in_turn(compiler.layouts)[FIRST:] if bucket not in kept]
    alone = compiler.platform.is_cpu and compiler.platform.sharding is None and not compiler.is_staged
    if compiler.cache.folder is None or not alone or len(rest) * compiler.model.config.num_layers < WORTH_A_PROCESS:
        return None
    specs: dict[Hashable, ProgramSpec] = {bucket: compiler.spec(bucket) for bucket in rest}
    if compiler.generates:
        specs[MASKED] = compiler.masked_spec(compiler.largest)
    try:
        return CompileProcess(compiler.cache, specs)
    except (OSError, pickle.PicklingError) as error:
        logger.warning("no process can be started that compiles programs, so the engine does: %s", error)
        return None


def _end(process: subprocess.Popen[bytes], programs: Sequence[Future[None]]) -> None:
    for program in programs:
        program.cancel()
    process.kill()
    process.wait()


def _converse(process: subprocess.Popen[bytes], message: bytes, programs: Sequence[Future[None]]) -> None:
    """Sends what to compile, and receives what is done, until the process ends."""
    assert process.stdin is not None and process.stdout is not None
    # It may have ended before it was told all: then the answers say so, and closing the pipe fails once more.
    with process.stdout, suppress(OSError), process.stdin:
        with suppress(OSError):
            process.stdin.write(message)
            process.stdin.flush()
        for line in process.stdout:
            number, error = json.loads(line)
            _finish(programs[number], error)
    code = process.wait()
    left = [program for program in programs if not program.done()]
    if left:
        logger.warning(
            "the process that compiles programs %s; the engine compiles %d of them itself, beside requests",
            how_it_ended(code),
            len(left),
        )
    for program in left:
        _finish(program, f"the process that compiles programs {how_it_ended(code)}")


def _finish(program: Future[None], error: str | None) -> None:
    if not program.set_running_or_notify_cancel():
        return
    if error is None:
        program.set_result(None)
    else:
        program.set_exception(CompileError(error))


class _Pickler(pickle.Pickler):
    """Names devices, which are another process's there; see ``process_main``."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)

    def dump(self, value: Any) -> None:
        try:
            super().dump(value)
        except (TypeError, AttributeError) as error:  # pickle raises these for what it cannot pickle
            raise pickle.PicklingError(str(error)) from error

    def persistent_id(self, value: Any) -> Any:
        return (value.platform, value.id) if isinstance(value, jax.Device) else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, MappingProxyType):
            return read_only, (dict(value),)
        return NotImplemented


def read_only(values: dict[Any, Any]) -> Mapping[Any, Any]:
    """A view of a dict, whose type has no name to be unpickled by."""
    return MappingProxyType(values)
