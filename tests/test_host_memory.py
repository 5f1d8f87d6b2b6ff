"""Freed blocks are kept for the next allocation, and given back when asked: in a process whose settings they are."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from llmjax.host_memory import free_memory, own_memory

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


def test_free_and_own_memory(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text(
        "MemTotal:  100 kB\nMemFree:   10 kB\nMemAvailable:   60 kB\nHugePages_Total: 0\n"
    )
    (tmp_path / "self" / "status").write_text("Name:\tx 1 kB\nRssAnon:\t  7 kB\nRssFile:\t  9 kB\nRssShmem:\t  2 kB\n")
    assert (free_memory(tmp_path), own_memory(tmp_path)) == (60 * 1024, 9 * 1024)
    assert free_memory(tmp_path / "self") > 0 == own_memory(tmp_path / "nowhere")  # elsewhere than on Linux


def test_free_memory_of_nodes(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable:   60 kB\n")
    for node, free in ((0, 12), (1, 20)):
        (tmp_path / f"node{node}").mkdir()
        lines = {"MemTotal": 100, "MemFree": free, "Active(file)": 3, "Inactive(file)": 4, "SReclaimable": 1, "Slab": 9}
        text = "".join(f"Node {node} {name}:    {size} kB\n" for name, size in lines.items())
        (tmp_path / f"node{node}" / "meminfo").write_text(text)
    found = [free_memory(tmp_path, nodes=nodes, system=tmp_path) // 1024 for nodes in ((), (0,), (1,), (0, 1), (0, 7))]
    assert found == [60, 20, 28, 48, 60]  # a node of which nothing is known bounds nothing


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_own_memory_grows_with_what_is_written() -> None:
    before = own_memory()
    with mmap.mmap(-1, 2**26) as block:  # never what the allocator has kept
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        assert own_memory() >= before + 2**25  # what else there is may come and go
