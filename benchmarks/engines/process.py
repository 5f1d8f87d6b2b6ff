"""The other end of ``worker``: an engine's process as the comparison sees it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines.interface import EngineOptions
from llmjax.errors import LLMJaxError

REPOSITORY = Path(__file__).parents[2]
STOP_SECONDS = 20.0


class EngineFailed(LLMJaxError):
    """An engine did not start, ended, or answered with an error."""


@dataclass(frozen=True)
class Generated:
    """The answers to some prompts and the wall time of the engine's call."""

    seconds: float
    tokens: list[list[int]]


class EngineProcess:
    """A running engine.

    Args:
        name: key of ``ADAPTERS``.
        python: the interpreter that has the engine.
        options: what it is started with.

    Raises:
        EngineFailed: it cannot be started or cannot load the model.
    """

    def __init__(self, name: str, *, python: str, options: EngineOptions) -> None:
        self.name = name
        self._log = Path(options.work_dir) / f"{name}.log"
        with self._log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    [python, "-m", "benchmarks.engines.worker", name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=REPOSITORY,
                    text=True,
                    start_new_session=True,  # a group of its own, with the processes that the engine starts
                )
            except OSError as error:
                raise EngineFailed(f"{name}: cannot start {python}: {error.strerror}") from None
        try:
            self.details: dict[str, str] = self._ask(dataclasses.asdict(options))["details"]
        except EngineFailed:
            self.close()
            raise

    def warm_up(self) -> None:
        self._ask({"warm_up": True})

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generated:
        """Exactly ``new_tokens`` tokens for each prompt.

        Raises:
            EngineFailed: the engine ended or answered with an error.
        """
        reply = self._ask({"prompts": prompts, "new_tokens": new_tokens})
        return Generated(seconds=reply["seconds"], tokens=reply["tokens"])

    def pause(self) -> None:
        """Stops its threads, which may spin while they wait for work and would disturb what is measured."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Lets it run inside the block; outside it is paused."""
        self.resume()
        try:
            yield
        finally:
            self.pause()

    def close(self) -> None:
        self.resume()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(STOP_SECONDS)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineFailed(f"{self.name}: the process ended; see {self._log}") from None
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailed(f"{self.name}: the process ended; see {self._log}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EngineFailed(f"{self.name}: {reply['error']} (log: {self._log})")
        return reply

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
