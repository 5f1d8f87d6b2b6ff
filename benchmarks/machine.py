"""What a benchmark ran on, in words."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from llmjax.kernels.cpu.cores import usable_cores


@dataclass(frozen=True)
class Machine:
    """The computer: processor, cores that may be used, GiB of memory, operating system."""

    cpu: str
    cores: int
    memory_gib: float
    system: str

    def __str__(self) -> str:
        return f"{self.cores} cores of {self.cpu}, {self.memory_gib:.0f} GiB, {self.system}"


def this_machine() -> Machine:
    """From Linux's /proc/cpuinfo where it is, else from what Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return Machine(
        cpu=match[1] if match else platform.processor() or platform.machine(),
        cores=usable_cores(),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        system=f"{platform.system()} {platform.release()}",
    )
