"""How many threads are of use, from what Linux shows of a process: files written down here as containers have them."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from llmjax.kernels.cpu import build, cores
from llmjax.kernels.cpu.cores import physical_cores, usable_cores

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)


def process(folder: Path, *, groups: str, mounts: str) -> Path:
    """A /proc/self whose mounts lie in the folder."""
    proc = folder / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(groups)
    (proc / "mountinfo").write_text(mounts.replace("@", str(folder)))
    return proc


def version_2(folder: Path, limits: dict[str, str], *, group: str = "/a/b", root: str = "/") -> Path:
    for name, limit in limits.items():
        (folder / "sys" / name).mkdir(parents=True, exist_ok=True)
        (folder / "sys" / name / "cpu.max").write_text(limit + "\n")
    return process(folder, groups=f"0::{group}\n", mounts=f"30 23 0:26 {root} @/sys rw shared:9 - cgroup2 cgroup2 rw\n")


def version_1(folder: Path, quota: str) -> Path:
    group = folder / "sys" / "cpu,cpuacct" / "inner"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text(quota + "\n")
    (group / "cpu.cfs_period_us").write_text("50000\n")
    mounts = (
        "31 23 0:28 / @/sys rw - tmpfs tmpfs rw\n"
        "32 31 0:29 /docker/x @/sys/memory rw - cgroup cgroup rw,memory\n"
        "33 31 0:30 /docker/x @/sys/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "34 31 0:31 / @/sys/unified rw - cgroup2 cgroup2 rw\n"
    )
    groups = "9:name=systemd:/\n4:memory:/docker/x/inner\n2:cpu,cpuacct:/docker/x/inner\n0::/\n"
    return process(folder, groups=groups, mounts=mounts)


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({}, 64),
        ({"a/b": "max 100000"}, 64),
        ({"a/b": "200000 100000"}, 2),
        ({"a/b": "150000 100000"}, 2),
        ({"a/b": "1000 100000"}, 1),
        ({"a/b": "6400000 50000"}, 64),
        ({"": "800000 100000", "a": "300000 100000", "a/b": "max 100000"}, 3),  # what is above limits too
        ({"a/b": "nonsense"}, 64),
        ({"a/b": "100000 0"}, 64),
    ],
)
def test_quota_of_version_2(limits: dict[str, str], count: int, tmp_path: Path) -> None:
    assert usable_cores(version_2(tmp_path, limits)) == count


@pytest.mark.parametrize(("quota", "count"), [("-1", 64), ("100000", 2), ("120000", 3)])
def test_quota_of_version_1(quota: str, count: int, tmp_path: Path) -> None:
    assert usable_cores(version_1(tmp_path, quota)) == count


def test_a_container_sees_its_group_as_the_root(tmp_path: Path) -> None:
    proc = version_2(tmp_path, {"": "400000 100000"}, group="/docker/x", root="/docker/x")
    assert usable_cores(proc) == 4
    (tmp_path / "other").mkdir()
    outside = version_2(tmp_path / "other", {"": "500000 100000"}, group="/../y", root="/docker/x")
    assert usable_cores(outside) == 5


def test_the_affinity_mask_counts_where_it_is_narrower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert usable_cores(version_2(tmp_path, {"a/b": "800000 100000"})) == 2


def test_systems_without_masks_and_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert usable_cores(tmp_path / "nothing") == physical_cores(tmp_path / "nothing", tmp_path) == 8
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(tmp_path / "nothing") == 1


def siblings(folder: Path, *lists: str) -> Path:
    """Cores as /sys shows them; core i says which ones are threads of its physical core."""
    for core, text in enumerate(lists):
        topology = folder / "cpus" / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(text + "\n")
    return folder / "cpus"


@pytest.mark.parametrize(
    ("allowed", "quota", "count"),
    [
        (range(8), "max 100000", 4),
        ((0, 4), "max 100000", 1),  # both threads of one
        ((0, 1, 5), "max 100000", 2),
        (range(8), "300000 100000", 3),  # `docker --cpus=3`
        (range(8), "600000 100000", 4),
        ((9, 10), "max 100000", 2),  # nothing is known of them
    ],
)
def test_threads_of_a_core_count_once(
    allowed: Sequence[int], quota: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed), raising=False)
    cpus = siblings(tmp_path, *2 * ("0,4", "1,5", "2,6", "3,7"))
    assert physical_cores(version_2(tmp_path, {"a/b": quota}), cpus) == count


def test_the_build_counts_alike_before_anything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build._usable_cores() == usable_cores()
    monkeypatch.setattr(sys, "path", [])
    assert set(runpy.run_path(str(ROOT / "kernels" / "cpu" / "cores.py"))) >= {"usable_cores"}


def test_nothing_else_counts_cores() -> None:
    allowed = {Path(cores.__file__).resolve(), ROOT / "llmjax" / "cpu_affinity.py"}
    allowed.add(ROOT / "llmjax" / "engine" / "tuning" / "measure_main.py")  # which takes one of them
    for path in (path for layer in ("kernels", "models", "llmjax", "serve") for path in (ROOT / layer).rglob("*.py")):
        if path.resolve() not in allowed:
            text = path.read_text(encoding="utf-8")
            assert "cpu_count(" not in text and "sched_getaffinity(" not in text, path
