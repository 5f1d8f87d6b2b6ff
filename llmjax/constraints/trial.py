"""Tries a grammar in another process, which is killed if it exceeds a limit, because the library has no limits.

A schema of a thousand characters can keep the library busy for hours, and an expression of 100,000 can take all memory.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from llmjax.constraints.matchers import Vocabulary
from llmjax.constraints.trial_wire import read, vocabulary_bytes
from llmjax.errors import InvalidRequest, LLMJaxError
from llmjax.frames import receive_frame, send_frame
from llmjax.limited_process import LimitedProcess
from llmjax.system import python_path
from llmjax.turns import Turn

START_SECONDS = 60.0  # for a very busy machine; usually it takes a few tenths of a second
END_SECONDS = 5.0  # for the end of a trial


class GrammarProcessError(LLMJaxError):
    """The process that tries grammars cannot be started, or has ended."""


class GrammarRefused(InvalidRequest):
    """A grammar is wrong or exceeds a limit, every time that it is tried."""


@dataclass(frozen=True, kw_only=True)
class TrialLimits:
    """The limits for one grammar.

    Args:
        cpu_seconds: computing time, after which the trial is killed.
        wall_seconds: time until the answer is there, however busy the machine is.
        short_seconds: time after which a trial counts as one that takes long.
        memory: bytes of address space beyond those of a process that knows the vocabulary.
    """

    cpu_seconds: float = 5.0
    wall_seconds: float = 60.0
    short_seconds: float = 0.3
    memory: int = 2**29


class GrammarTrial:
    """Tries grammars in processes that start when they are first needed.

    It is thread-safe: there are as many processes as threads have asked at the same time.

    Args:
        vocabulary: makes the vocabulary; called once for each process.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], *, limits: TrialLimits | None = None) -> None:
        self._vocabulary = vocabulary
        self._limits = limits or TrialLimits()
        self._lock = threading.Lock()
        self._idle: list[_Process] = []

    def error(self, grammar: str, *, turn: Turn | None = None) -> str:
        """The library's objection to a grammar; empty: none.

        Args:
            turn: it is told if this takes long; an exception that it raises ends the trial.

        Raises:
            GrammarRefused: the grammar exceeds the limit of computing time or memory.
            InvalidRequest: the trial exceeds the limit of wall time.
            GrammarProcessError: the process cannot be started, or has ended.
        """
        process = self._process()
        try:
            return process.error(grammar, turn)
        finally:
            if process.alive:
                with self._lock:
                    self._idle.append(process)

    def _process(self) -> _Process:
        with self._lock:
            while self._idle:
                if (process := self._idle.pop()).alive:
                    return process
        return _Process(self._vocabulary(), self._limits)


class _Process:
    def __init__(self, vocabulary: Vocabulary, limits: TrialLimits) -> None:
        self._limits = limits
        environment = {**os.environ, "PYTHONPATH": python_path()}
        try:
            self._process = LimitedProcess("llmjax.constraints.trial_main", limits, environment=environment)
        except OSError as error:
            raise GrammarProcessError(f"the process that tries grammars cannot be started: {error}") from error
        self._socket = self._process.socket
        self._socket.settimeout(START_SECONDS)
        try:
            send_frame(self._socket, vocabulary_bytes(vocabulary))
            ready = receive_frame(self._socket)
        except OSError:
            ready = None
        if ready is None:
            code = self._process.exit_code()
            raise GrammarProcessError(f"the process that tries grammars did not start (exit status {code})")

    @property
    def alive(self) -> bool:
        return self._process.alive

    def error(self, grammar: str, turn: Turn | None) -> str:
        """See ``GrammarTrial.error``. The process is kept unless it has ended or does not answer."""
        try:
            self._socket.settimeout(self._limits.wall_seconds)
            send_frame(self._socket, grammar.encode())
            code, error = self._answer(turn)
        except OSError as failure:
            raise GrammarProcessError(f"the process that tries grammars has ended: {failure}") from None
        if code == -signal.SIGPROF:
            raise GrammarRefused(f"it takes more than {self._limits.cpu_seconds:g} s of computing time")
        if code:
            raise GrammarRefused(
                f"it takes more than {self._limits.memory >> 20} MiB of memory, or the library fails at it"
            )
        return error

    def _answer(self, turn: Turn | None) -> tuple[int, str]:
        if self._comes(self._limits.short_seconds):
            return self._read()
        try:
            if turn is not None:
                turn.takes_long()
        except BaseException:
            self._end()
            raise
        self._process.signal(signal.SIGUSR2)
        if self._comes(self._limits.wall_seconds):
            return self._read()
        self._end()
        raise InvalidRequest(f"it takes more than {self._limits.wall_seconds:g} s")

    def _comes(self, seconds: float) -> bool:
        """Waits until there is something to read or the connection ends; False if the time is over first."""
        return bool(select.select([self._socket], [], [], seconds)[0])

    def _read(self) -> tuple[int, str]:
        if (answer := receive_frame(self._socket)) is None:
            raise ConnectionResetError(f"exit status {self._process.exit_code()}")
        return read(answer)

    def _end(self) -> None:
        """Ends the trial, whose answer must not be mistaken for the next one's."""
        self._process.signal(signal.SIGUSR1)
        if self._comes(END_SECONDS):
            self._read()
        else:
            self._process.kill()
