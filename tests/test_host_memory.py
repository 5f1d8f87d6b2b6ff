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


def machine_of(folder: Path, *, groups: str, mounts: str, available: int = 10_000) -> Path:
    """What Linux shows of a process in some cgroups; ``@`` in mounts stands for the folder."""
    (folder / "self").mkdir()
    (folder / "meminfo").write_text(f"MemAvailable:   {available} kB\n")
    (folder / "self" / "cgroup").write_text(groups)
    (folder / "self" / "mountinfo").write_text(mounts.replace("@", str(folder)))
    return folder


def group(folder: Path, *, stat: dict[str, int], **files: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / f"memory.{name}").write_text(f"{value}\n")
    (folder / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ("/", "/pod/box"),  # the machine's groups
        ("/", "/"),  # a group namespace: the container's own group is the root
        ("/pod/box", "/pod/box"),  # the container's own group is mounted as the root
    ],
)
def test_a_cgroup_bounds_free_memory(tmp_path: Path, root: str, path: str) -> None:
    proc = machine_of(
        tmp_path, groups=f"0::{path}\n", mounts=f"30 23 0:26 {root} @/sys rw shared:9 - cgroup2 cgroup2 rw\n"
    )
    own = tmp_path / "sys" / (path.removeprefix(root).strip("/") if root != path else "")
    files = {"anon": 900, "file": 600, "active_file": 100, "inactive_file": 200, "slab_reclaimable": 30, "shmem": 300}
    group(own, max=2**20, current=2**19, high="max", stat=files)
    assert free_memory(proc) == 2**20 - 2**19 + 330
    group(own, max=2**20, current=2**19, high=2**19 + 1000, stat=files)
    assert free_memory(proc) == 1330
    group(own, max=1000, current=5000, high="max", stat=files)
    assert free_memory(proc) == 0
    group(own, max="max", current=5000, high="max", stat=files)
    assert free_memory(proc) == 10_000 * 1024


def test_the_least_of_all_groups_above_counts(tmp_path: Path) -> None:
    proc = machine_of(tmp_path, groups="0::/pod/box\n", mounts="30 23 0:26 / @/sys rw shared:9 - cgroup2 cgroup2 rw\n")
    group(tmp_path / "sys" / "pod" / "box", max=9000, current=1000, stat={})
    assert free_memory(proc) == 8000
    group(tmp_path / "sys" / "pod", max=9000, current=7000, stat={"inactive_file": 500})
    assert free_memory(proc) == 2500


def test_groups_of_version_1(tmp_path: Path) -> None:
    """They have no limit above them all that is one: a number that no machine has."""
    mounts = (
        "32 31 0:29 /docker/x @/sys/memory rw - cgroup cgroup rw,memory\n33 31 0:30 / @/sys/u rw - cgroup2 cgroup2 rw\n"
    )
    proc = machine_of(tmp_path, groups="4:memory:/docker/x\n1:cpu:/docker/x\n0::/docker/x\n", mounts=mounts)
    stat = {"active_file": 1, "total_active_file": 100, "total_inactive_file": 200}
    group(tmp_path / "sys" / "memory", limit_in_bytes=2**20, usage_in_bytes=2**19, stat=stat)
    assert free_memory(proc) == 2**19 + 300
    group(tmp_path / "sys" / "memory", limit_in_bytes=9223372036854771712, usage_in_bytes=2**19, stat=stat)
    assert free_memory(proc) == 10_000 * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_own_memory_grows_with_what_is_written() -> None:
    before = own_memory()
    with mmap.mmap(-1, 2**26) as block:  # never what the allocator has kept
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        assert own_memory() >= before + 2**25  # what else there is may come and go
