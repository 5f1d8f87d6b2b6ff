"""Tries a grammar in another process, which is ended where it takes too much: the library has no bound of its own.

A schema of a thousand characters can keep it busy for hours, and an expression of 100,000 can take all memory.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from llmjax.constraints.matchers import Vocabulary
from llmjax.constraints.trial_wire import LAST, vocabulary_bytes
from llmjax.errors import InvalidRequest, LLMJaxError
from llmjax.frames import receive_frame, send_frame
from llmjax.limited_process import LimitedProcess
from llmjax.system import python_path

START_SECONDS = 60.0  # a bound for a machine that is very busy; it takes a few tenths of a second


class GrammarProcessError(LLMJaxError):
    """The process that tries grammars cannot be started."""


@dataclass(frozen=True, kw_only=True)
class TrialLimits:
    """What one grammar may take.

    Args:
        cpu_seconds: computing time, after which the process is killed.
        wall_seconds: time until the answer is there, however busy the machine is.
        memory: bytes of address space beside what the process has once it knows the vocabulary.
        kept_memory: bytes of resident memory beside that; a process that keeps more makes room for a fresh one.
    """

    cpu_seconds: float = 5.0
    wall_seconds: float = 60.0
    memory: int = 2**30
    kept_memory: int = 2**26


class GrammarTrial:
    """Finds out whether a grammar can be had, in a process that starts when it is first needed. Thread-safe; grammars
    are tried one after the other.

    Args:
        vocabulary: makes what they are matched with; called once for each process.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], *, limits: TrialLimits | None = None) -> None:
        self._vocabulary = vocabulary
        self._limits = limits or TrialLimits()
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def error(self, grammar: str) -> str:
        """What the library says against a grammar; empty: nothing.

        Raises:
            InvalidRequest: it takes more than the limits.
            GrammarProcessError: there is no process.
        """
        with self._lock:
            if self._process is None or not self._process.alive:
                self._process = _Process(self._vocabulary(), self._limits)
            error, last = self._process.error(grammar)
            if last:
                self._process = None
            return error


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

    def error(self, grammar: str) -> tuple[str, bool]:
        """What is against the grammar, and whether the process ends now."""
        self._socket.settimeout(self._limits.wall_seconds)
        try:
            send_frame(self._socket, grammar.encode())
            answer = receive_frame(self._socket)
        except TimeoutError:
            self._process.exit_code()
            raise InvalidRequest(f"it takes more than {self._limits.wall_seconds:g} s") from None
        except OSError:
            answer = None
        if answer is None:
            raise InvalidRequest(self._reason(self._process.exit_code()))
        return answer[1:].decode(), answer[:1] == LAST

    def _reason(self, code: int) -> str:
        if code == -signal.SIGPROF:
            return f"it takes more than {self._limits.cpu_seconds:g} s of computing time"
        return f"it takes more than {self._limits.memory >> 20} MiB of memory, or the library fails at it"
