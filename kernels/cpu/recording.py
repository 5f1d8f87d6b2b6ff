"""What the threads of the C++ kernels spend their time on, recorded while somebody asks for it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from llmjax.kernels.cpu.library import opened_handle

# In the order of the enumeration in src/recording.h.
WORK = ("other", "rounding", "products", "stores", "attention", "norms", "recurrence", "sampling")


@dataclass
class Recording:
    """Seconds of all threads together, filled in when the recording ends."""

    busy: Mapping[str, float] = field(default_factory=dict)  # by WORK, with the tasks of phases
    waiting: Mapping[str, float] = field(default_factory=dict)  # by WORK, for other threads at the end of a phase
    calling: float = 0.0  # of the threads that call, from the beginning of a call to its end
    calls: int = 0
    phases: int = 0


@contextmanager
def recorded() -> Iterator[Recording]:
    """Records what is computed within, by all threads of the process.

    Raises:
        RuntimeError: the kernels are not built.
    """
    handle = opened_handle()
    if handle is None:
        raise RuntimeError("there are no C++ kernels to record")
    recording = Recording()
    handle.llmjax_record(1)
    try:
        yield recording
    finally:
        counts = (ctypes.c_int64 * (2 * len(WORK) + 3))()
        handle.llmjax_recorded(counts)
        handle.llmjax_record(0)
        seconds = [1e-9 * count for count in counts]
        recording.busy = dict(zip(WORK, seconds[: len(WORK)], strict=True))
        recording.waiting = dict(zip(WORK, seconds[len(WORK) : 2 * len(WORK)], strict=True))
        recording.calling = seconds[2 * len(WORK)]
        recording.calls, recording.phases = counts[-2], counts[-1]
