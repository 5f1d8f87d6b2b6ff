"""What no kernel of a CPU exceeds: how fast plain loops read memory and multiply registers (``limits.cc``)."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from pathlib import Path

import numpy as np

from llmjax.kernels.cpu import build
from llmjax.kernels.cpu.cores import usable_cores

SOURCE = Path(__file__).with_suffix(".cc")
KINDS = ("f32", "int8", "bf16", "int16")  # of numbers that are multiplied
ROUNDS = 20_000  # of a dozen instructions each: under a millisecond


class Limits:
    """Loops compiled for one instruction set, run by as many threads as kernels have.

    Args:
        isa: the name of an instruction set that this machine has.

    Raises:
        build.BuildError: there is no compiler, or it does not know the instruction set.
    """

    def __init__(self, isa: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            loaded = ctypes.CDLL(str(build.compile_alone(SOURCE, Path(folder, "limits.so"), isa=isa)))
        self._read = loaded.llmjax_read_speed
        self._read.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int)
        self._read.restype = ctypes.c_double
        self._multiply = loaded.llmjax_multiply_speed
        self._multiply.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_int)
        self._multiply.restype = ctypes.c_double
        self._threads = usable_cores()

    def read(self, size: int, *, repeat: int = 3) -> float:
        """Bytes a second of the fastest of ``repeat`` readings of ``size`` bytes, always the same ones."""
        memory = _memory(size)
        speed: float = self._read(memory.ctypes.data, memory.nbytes, self._threads, repeat)
        return speed

    def multiply(self, kind: str, *, repeat: int = 3) -> float:
        """Operations a second, a product and its addition as two, of the fastest of ``repeat`` runs.

        Args:
            kind: one of `KINDS`. Where the instruction set does not multiply it, what kernels then do: f32.
        """
        speed: float = self._multiply(KINDS.index(kind), ROUNDS, self._threads, repeat)
        return speed


@functools.cache
def limits(isa: str) -> Limits:
    """`Limits`, compiled once."""
    return Limits(isa)


@functools.lru_cache(maxsize=1)
def _memory(size: int) -> np.ndarray:
    return np.ones(size, np.uint8)  # written, or all pages would be the same one
