"""The machine's memory: what is free, what this process has, and what glibc's allocator keeps and gives back (elsewhere
than on Linux with glibc nothing happens)."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmjax.kernels.cpu.cores import groups_above

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
BLOCK = 1 << 30  # bytes; a larger block is mapped afresh each time
PROC = Path("/proc")
SYSTEM = Path("/sys/devices/system/node")
GIVEN_UP = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")  # of a node; it has no MemAvailable

FILE_PAGES = ("active_file", "inactive_file", "slab_reclaimable")  # of a cgroup; version 1 does not have the last


def free_memory(proc: Path = PROC, *, nodes: Sequence[int] = (), system: Path = SYSTEM) -> int:
    """Bytes of memory that are free, or would be if something else needed them: of the machine's, or of what a cgroup
    above this process may have, as that of a container.

    Args:
        proc: what Linux shows of memory; elsewhere half of all counts as free.
        nodes: NUMA nodes whose memory it is; (): all.
        system: what Linux shows of them.
    """
    available = _sizes(proc / "meminfo").get("MemAvailable")
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 if available is None else available
    free = min([free, *_left_to_groups(proc)])
    of_nodes = [_sizes(system / f"node{node}" / "meminfo") for node in nodes]
    if not of_nodes or not all(of_nodes):
        return free
    return min(free, sum(sizes.get(name, 0) for sizes in of_nodes for name in GIVEN_UP))


def _left_to_groups(proc: Path) -> Iterator[int]:
    """Bytes that each cgroup above the process may take yet. Pages of files count for it, but make room."""
    for group, version in groups_above(proc / "self", "memory"):
        names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
        limits = [int(text) for name in names if (text := _text(group / name)).isdecimal()]  # not "max"
        used = _text(group / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        if limits and used.isdecimal():
            prefix = "" if version == 2 else "total_"  # of the groups below, too
            lines = (line.split() for line in _text(group / "memory.stat").splitlines())
            sizes = {line[0]: int(line[1]) for line in lines if len(line) == 2}
            files = sum(sizes.get(f"{prefix}{name}", 0) for name in FILE_PAGES)
            yield max(0, min(limits) - int(used) + files)


def machine() -> str:
    """What tells this machine, since it was started, from others."""
    boot = PROC / "sys" / "kernel" / "random" / "boot_id"
    return boot.read_text().strip() if boot.exists() else f"{platform.node()} {uuid.getnode()}"


def own_memory(proc: Path = PROC) -> int:
    """Bytes that this process alone has in memory; 0 where Linux does not say. Pages of files are not its own."""
    sizes = _sizes(proc / "self" / "status")
    return sizes.get("RssAnon", 0) + sizes.get("RssShmem", 0)


def _sizes(path: Path) -> dict[str, int]:
    """Bytes by name, from lines such as ``MemFree: 12 kB``, or ``Node 0 MemFree: 12 kB``."""
    if not path.exists():
        return {}
    lines = (line.split()[-3:] for line in path.read_text().splitlines())
    return {line[0].removesuffix(":"): int(line[1]) * 1024 for line in lines if len(line) == 3 and line[2] == "kB"}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # not there, or not for everybody
        return ""


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
