"""What a benchmark ran on, in words."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

from llmjax.kernels.cpu.cores import usable_cores
from llmjax.system import processor_name


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
    """From what Linux or Python knows."""
    return Machine(
        cpu=processor_name(),
        cores=usable_cores(),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        system=f"{platform.system()} {platform.release()}",
    )


def commit() -> str:
    """The commit that is measured, with a mark if files differ from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"
