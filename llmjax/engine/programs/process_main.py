"""Compiles programs beside a serving engine: ``python -m llmjax.engine.programs.process_main``.

Standard input names what to compile, standard output says what is done. The process ends when its parent does.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from llmjax.collector import permanent
from llmjax.cpu_affinity import half_of_cores

if TYPE_CHECKING:
    import jax

    from llmjax.engine.programs.cache import ProgramCache, ProgramSpec

NICENESS = 10  # a stream that wants a core gets nine tenths of it
TASKS = Path("/proc/self/task")


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the parent's affair
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    os.nice(NICENESS)  # before JAX starts threads, which inherit it
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with permanent():
        cache, specs = _read(sys.stdin.buffer)
    threading.Thread(target=_watch, args=(sys.stdin.buffer,), name="parent", daemon=True).start()
    cores = half_of_cores()
    _keep_to(cores)  # the pools of XLA's client, whose size is part of programs, are there by now
    lock = threading.Lock()

    def compile(number: int) -> None:
        signature, spec = specs[number]
        error = _compile(cache, signature, spec)
        with lock:
            print(json.dumps((number, error)), file=answers)

    with ThreadPoolExecutor(len(cores)) as pool:
        list(pool.map(compile, range(len(specs))))
    sys.stderr.flush()
    os._exit(0)


def _read(file: IO[bytes]) -> tuple[ProgramCache, list[tuple[str | None, ProgramSpec]]]:
    """The cache and what is to be compiled, by its signature."""
    import jax

    from llmjax import jax_settings
    from llmjax.engine.programs.cache import ProgramCache
    from llmjax.errors import CompileError

    environment = pickle.load(file)
    jax_settings.compile_as(environment.settings)
    devices = {(device.platform, device.id): device for device in jax.devices()}
    cache = ProgramCache.of(environment.folder.parent.parent, jax.devices()[0])
    specs = _Unpickler(file, devices).load()
    if cache.folder != environment.folder:
        raise CompileError("the process that compiles programs is not like the engine's")
    return cache, specs


class _Unpickler(pickle.Unpickler):
    """Knows devices by name."""

    def __init__(self, file: IO[bytes], devices: dict[tuple[str, int], jax.Device]) -> None:
        super().__init__(file)
        self._devices = devices

    def persistent_load(self, name: Any) -> jax.Device:
        return self._devices[name]


def _compile(cache: ProgramCache, signature: str | None, spec: ProgramSpec) -> str | None:
    """Compiles and keeps it; None, or what went wrong."""
    if cache.signature(spec) != signature:
        return "the process that compiles programs does not find it by the engine's signature"
    try:
        cache.get(spec)
    except Exception as error:  # whatever XLA says
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None if cache.has(spec) else "the program could not be kept"


def _watch(file: IO[bytes]) -> None:
    """Ends the process when the parent does, whatever XLA is doing."""
    with suppress(OSError):
        file.read()
    os._exit(1)


def _keep_to(cores: Collection[int]) -> None:
    """All threads that there are, and those that they start."""
    if TASKS.exists():
        for task in TASKS.iterdir():
            with suppress(OSError):  # it has ended
                os.sched_setaffinity(int(task.name), cores)


if __name__ == "__main__":
    main()
