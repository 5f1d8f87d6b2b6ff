"""What glibc's allocator keeps and gives back. Elsewhere than on Linux with glibc nothing happens."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
BLOCK = 1 << 30  # bytes; a larger block is mapped afresh each time


def give_back() -> None:
    """Returns freed memory to the system; compiling leaves tens of MB a program in the arenas."""
    if (trim := _function("malloc_trim")) is not None:
        trim(0)


def keep_freed_blocks() -> None:
    """Keeps what is freed with the process, for the next allocation.

    A step's temporaries are allocated and freed with every dispatch. Mapped each time, the system would zero every one
    of their pages first, which took a third of the time of large products.
    """
    if (set_option := _function("mallopt")) is not None:
        set_option(M_MMAP_THRESHOLD, BLOCK)
        set_option(M_TRIM_THRESHOLD, BLOCK)


def _function(name: str) -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
