"""The host's memory for weights, as XLA wants it on a CPU: it then takes arrays as they are and copies nothing."""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np

XLA_ALIGNMENT = 64  # bytes
HUGE_PAGE = 1 << 21
PIECE = 1 << 26  # bytes that are mapped at a time, at least


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """As `np.empty`, where XLA wants it."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + XLA_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % XLA_ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)


class HugePages:
    """Arrays one behind the other, so that small ones lie in huge pages too: a core that need not find a page every
    4 KiB reads weights faster. A piece of memory lives as long as one of its arrays. Where the system has no huge
    pages, these are usual ones."""

    def __init__(self) -> None:
        self._piece = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """As `aligned_empty`."""
        nbytes = math.prod(shape) * dtype.itemsize
        taken = max(-(-nbytes // XLA_ALIGNMENT), 1) * XLA_ALIGNMENT
        if taken > self._piece.nbytes:
            self._piece = _map(max(taken, PIECE))
        array, self._piece = self._piece[:nbytes], self._piece[taken:]
        return array.view(dtype).reshape(shape)


def _map(nbytes: int) -> np.ndarray:
    """Fresh memory from the beginning of a huge page on."""
    size = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    found = np.frombuffer(memory, np.uint8)
    start = -found.ctypes.data % HUGE_PAGE
    return found[start : start + size]
