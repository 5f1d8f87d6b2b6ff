"""An engine in its own process: it has its own interpreter, and if it dies, its users survive."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from llmjax.adapters.reference import AdapterReference
from llmjax.config import EngineConfig
from llmjax.engine.clients.client import Control, Deliver, Died, RunningEngine
from llmjax.engine.clients.wire import (
    DUMP_STACKS,
    Abandon,
    Answer,
    Channel,
    Failed,
    FromEngine,
    Leave,
    Located,
    Log,
    Measured,
    Proceed,
    Question,
    Ready,
    ShowStacks,
    StacksShown,
    Start,
    StepMessage,
    Submit,
)
from llmjax.engine.core.request import EngineRequest
from llmjax.engine.core.stats import EngineTotals, KVStats
from llmjax.engine.info import EngineInfo, ProgramInfo
from llmjax.engine.need import Need
from llmjax.engine.tiers.disk_thread import CLOSE_SECONDS
from llmjax.errors import EngineDead, LLMJaxError
from llmjax.machine_share import WHOLE_MACHINE, MachineShare
from llmjax.system import python_path

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 5.0  # how long the process may take to end by itself
HEARD_AFTER = 5.0  # seconds in which a process that runs any Python at all has taken a message
ANSWERS: dict[Control, Any] = {Control.PROGRAMS: list[ProgramInfo], Control.KV_STATS: KVStats}


class ProcessEngine(RunningEngine):
    """An engine in a process that is started for it and ends with this one. ``wait_loaded`` says when it can be used.

    Args:
        config: everything; the process loads the model and compiles.
        share: this engine's part of the machine, where several engines divide it; log lines then name the engine.
        name: what log lines call it; None: what its share does.
        asks: whether it waits for ``proceed`` before it takes what it needs.

    Attributes:
        measured: what it needs, of an engine that asks; or why that is not known.
        loaded: done when the model is there, or with why it is not.
    """

    measured: Future[Need]
    loaded: Future[EngineInfo]

    def __init__(
        self,
        config: EngineConfig,
        share: MachineShare = WHOLE_MACHINE,
        *,
        name: str | None = None,
        asks: bool = False,
    ) -> None:
        super().__init__()
        self._name = share.name if name is None and not share.is_whole else name
        self._leave_seconds = LEAVE_SECONDS + (CLOSE_SECONDS if config.kv_offloading_dir is not None else 0)
        self.totals = EngineTotals()
        self.loggers = [self.totals]
        self._deliver: Deliver | None = None
        self._died: Died | None = None
        self._error: Exception | None = None
        self._failed: Exception | None = None  # the error that the process has sent
        self._code = 0  # the exit code
        self._stopping = threading.Event()  # it is told to end, or this process ends
        self._stacks_shown = threading.Event()
        self._lock = threading.Lock()  # guards the fields below, and the change from running to ended
        self._questions: dict[int, tuple[Control, Future[Any]]] = {}
        self._ended = False
        self._numbers = itertools.count()
        self.loaded = Future()
        self.measured = Future()
        self._located: Future[str] = Future()
        for future in (self.loaded, self.measured, self._located):
            future.set_running_or_notify_cancel()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        connection, self._process = _start_process()
        self._end = weakref.finalize(self, _kill, connection, self._process, self._stopping)  # at exit, too
        self._channel = Channel(connection, FromEngine)
        self._send(Start(config, share, logging.getLogger().getEffectiveLevel(), asks))
        self._reader = threading.Thread(target=self._read, name="from-engine", daemon=True)
        self._writer = threading.Thread(target=self._write, name="to-engine", daemon=True)
        self._reader.start()
        self._writer.start()

    def located(self) -> str:
        """Where the model's files are. Raises what ``wait_loaded`` raises if loading fails before they are found."""
        return self._located.result()

    def proceed(self) -> None:
        """Lets an engine that asks take what it needs."""
        self._send(Proceed())

    def wait_loaded(self) -> EngineInfo:
        """``info``, when the model is there; if it cannot be loaded, or the wait is interrupted, the process is ended.

        Raises:
            LLMJaxError: what the process raised while it loaded the model; other errors come as they are, too.
            EngineDead: it ended and did not say why.
        """
        try:
            self.info = self.loaded.result()
        except BaseException:
            self._end()
            raise
        return self.info

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def _show_stacks(self) -> None:
        self._stacks_shown.clear()
        self._send(ShowStacks())
        dump = threading.Timer(HEARD_AFTER, self._dump_stacks)
        dump.daemon = True
        dump.start()

    def _dump_stacks(self) -> None:
        # If it has not heard, some thread holds the interpreter's lock, and no other changes its stack. While they do,
        # this might end the process, which may only be slow.
        if not self._stacks_shown.is_set():
            self._process.send_signal(DUMP_STACKS)

    def start(self, *, deliver: Deliver, died: Died) -> None:
        with self._lock:
            self._deliver, self._died = deliver, died
            ended = self._ended
        if ended and self._error is not None:  # it did not live to see this
            died(self._error)

    def submit(self, request: EngineRequest) -> int:
        self._send(Submit.of(request))
        return 0

    def abort(self, request_id: int, index: int | None = None) -> None:
        self._send(Abandon(request_id, index))

    def control(self, control: Control, adapter: AdapterReference | None = None) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()
        with self._lock:
            if self._ended:
                answer.set_exception(EngineDead("the engine is not running"))
                return answer
            number = next(self._numbers)
            self._questions[number] = control, answer
        self._send(Question(number, control, adapter))
        return answer

    def stop(self) -> None:
        self._stopping.set()
        self._send(Leave())

    def kill(self) -> None:
        """Ends the process at once, as if it had died."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process, by force if it does not end by itself in a few seconds."""
        self.stop()
        if not self.loaded.done():  # it would not hear before it is
            self._end()
        self._reader.join(self._leave_seconds)
        self._end()
        self._reader.join()

    @property
    def running(self) -> bool:
        return not self._ended

    @property
    def error(self) -> BaseException | None:
        return self._error

    @property
    def exit_status(self) -> int:
        """The exit status of the process, as shells report it: 128 plus the signal's number if a signal killed it."""
        if self._error is None:
            return 0
        code = self._code or 1
        return 128 - code if code < 0 else code

    def _send(self, message: Any) -> None:
        # On a thread of its own, because a process that hangs takes nothing off the socket.
        self._outbox.put(self._channel.encode(message))

    def _write(self) -> None:
        with suppress(OSError):  # the other thread knows, too
            while (data := self._outbox.get()) is not None:
                self._channel.send_encoded(data)

    def _read(self) -> None:
        broken: Exception | None = None
        try:
            for message in self._channel.receive():
                self._take(message)
        except OSError:  # the socket says that it has ended in more ways than one
            pass
        except Exception as error:
            broken = error
        self._process.kill()  # unless it has ended
        self._code = code = exit_code(self._process)
        self._outbox.put(None)
        self._end_with(self._failed or broken or LLMJaxError(f"its process {how_it_ended(code)}"))
        if not self.loaded.done():
            why = self._failed or EngineDead(f"the engine's process {how_it_ended(code)} before the model was loaded")
            for future in (self._located, self.measured):
                if not future.done():
                    future.set_exception(why)
            self.loaded.set_exception(why)
        self._process.wait()

    def _end_with(self, error: Exception) -> None:
        """Tells everybody who waits for the engine that it has ended; only once.

        Args:
            error: the error that ended it, unless it was told to end.
        """
        with self._lock:
            if self._ended:
                return
            self._ended, self._error = True, self._failed if self._stopping.is_set() else error
            questions, self._questions = self._questions, {}
            died = self._died
        for _, answer in questions.values():
            answer.set_exception(EngineDead("the engine is not running"))
        if self._error is not None and self.loaded.done():
            if self._failed is None:
                trace = None if isinstance(error, LLMJaxError) else error
                logger.error("%s stopped: %s", self._name or "the engine", error, exc_info=trace)
            if died is not None:
                died(error)

    def _take(self, message: Any) -> None:
        match message:
            case StepMessage():
                for stats in message.stats:
                    for stat_logger in self.loggers:
                        stat_logger.record_step(stats)
                if message.request_ids and self._deliver is not None:
                    self._deliver(message.outputs())
            case Answer():
                with self._lock:
                    control, answer = self._questions.pop(message.number)
                if message.failure is not None:
                    answer.set_exception(message.failure.error())
                else:
                    answer.set_result(msgspec.convert(message.result, ANSWERS.get(control, type(None))))
            case Log():
                _log(message, self._name)
            case StacksShown():
                self._stacks_shown.set()
            case Located():
                self._located.set_result(message.path)
            case Measured():
                self.measured.set_result(message.need)
            case Ready():
                self.loaded.set_result(message.info)
            case Failed():
                self._failed = message.failure.error()
                if self.loaded.done():  # it takes long to give back much memory
                    self._end_with(self._failed)


def begin_loading(config: EngineConfig) -> ProcessEngine | None:
    """Starts a process that loads the model, without waiting for it; None: no single process has the engine."""
    return ProcessEngine(config) if config.engine_process == "process" and config.data_parallel_size == 1 else None


def _start_process() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Starts a new interpreter, and returns it with the socket to it."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "llmjax.engine.clients.process_main", str(theirs.fileno())]
    try:
        with theirs, signals_held_back():
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=python_environment()
            )
    except OSError as error:
        ours.close()
        raise EngineDead(f"the engine's process cannot be started: {error}") from error
    return ours, process


def python_environment() -> dict[str, str]:
    """The environment for a new interpreter that has to find the same modules as this one."""
    return {**os.environ, "PYTHONPATH": python_path()}


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Blocks the signals that a terminal or a supervisor sends to all processes, for those that the block starts, until
    they ignore the signals: only this process handles them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(connection: socket.socket, process: subprocess.Popen[bytes], stopping: threading.Event) -> None:
    stopping.set()
    process.kill()
    process.wait()
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # wakes the threads that wait for it
    connection.close()


def exit_code(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process that has been killed or has ended by itself. Where the system reports it before the
    process's last thread has ended and its memory is free, this does not wait for either."""
    code = process.poll()
    if code is None and sys.platform == "linux":
        with suppress(OSError, ValueError):
            # The last field, proc(5): as waitpid has it, 0 where it is not told.
            status = int(Path(f"/proc/{process.pid}/stat").read_text().rsplit(maxsplit=1)[1])
            code = os.waitstatus_to_exitcode(status) or None
    return process.wait() if code is None else code


def how_it_ended(code: int) -> str:
    """Says how a process with this exit code ended."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}{' (out of memory?)' if -code == signal.SIGKILL else ''}"


def _log(message: Log, engine: str | None) -> None:
    """Logs a record as if it had been made here: this process knows which levels are enabled, and the log format."""
    to = logging.getLogger(message.name)
    if to.isEnabledFor(message.level):
        text = message.message if engine is None else f"{engine}: {message.message}"
        record = to.makeRecord(message.name, message.level, message.path, message.line, text, (), None)
        record.exc_text = message.trace
        to.handle(record)
