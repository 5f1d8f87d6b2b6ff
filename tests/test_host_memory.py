"""Freed blocks are kept for the next allocation, and given back when asked: in a process whose settings they are."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, resource
import numpy as np
from llmjax.host_memory import give_back, keep_freed_blocks

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def touch():
    before = faults()
    np.ones(1 << 22)  # 32 MiB: 8192 pages
    return faults() - before

mapped = touch(), touch()
keep_freed_blocks()
kept = touch(), touch(), touch()
give_back()
print(min(mapped), kept[2], touch())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_kept_block_costs_no_page_faults() -> None:
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("not glibc")
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    mapped, kept, after = map(int, result.stdout.split())
    assert mapped >= kept + 8 and after >= kept + 8, result.stdout
