"""Allocates host memory for weights, aligned so that XLA on a CPU uses arrays in place and copies nothing."""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np

XLA_ALIGNMENT = 64  # bytes
HUGE_PAGE = 1 << 21
PIECE = 1 << 26  # least number of bytes that are mapped at a time


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Like `np.empty`, with the alignment that XLA requires."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + XLA_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % XLA_ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)


class HugePages:
    """Allocates arrays one after the other, so that small ones are in huge pages too, which cores read faster.

    A piece of memory lives as long as any of its arrays. Where the system has no huge pages, pages are ordinary.
    """

    def __init__(self) -> None:
        self._piece = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Like `aligned_empty`."""
        nbytes = math.prod(shape) * dtype.itemsize
        taken = max(-(-nbytes // XLA_ALIGNMENT), 1) * XLA_ALIGNMENT
        if taken > self._piece.nbytes:
            self._piece = _map(max(taken, PIECE))
        array, self._piece = self._piece[:nbytes], self._piece[taken:]
        return array.view(dtype).reshape(shape)


def _map(nbytes: int) -> np.ndarray:
    """Maps new memory that begins at a huge page."""
    size = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # a Linux kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    found = np.frombuffer(memory, np.uint8)
    start = -found.ctypes.data % HUGE_PAGE
    return found[start : start + size]
