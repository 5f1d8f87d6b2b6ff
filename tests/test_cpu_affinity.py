"""Cores, threads and NUMA nodes. What changes a whole process runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax import cpu_affinity
from llmjax.config import EngineConfig
from llmjax.cpu_affinity import NODES, bind_process, format_cpu_list, node_cores, parse_cpu_list, pool_threads
from llmjax.errors import ConfigError

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")

REPORT = """
import json, os, sys
from llmjax.config import EngineConfig
from llmjax.cpu_affinity import describe, pool_threads
from llmjax.errors import ConfigError
from llmjax.platforms import select_platform
found = []
for settings in json.loads(sys.argv[1]):
    try:
        select_platform(EngineConfig(**settings))
    except ConfigError as error:
        found.append(str(error))
    else:
        masks = {tuple(sorted(os.sched_getaffinity(int(task)))) for task in os.listdir("/proc/self/task")}
        found.append([pool_threads(), sorted(masks), describe(), "NPROC" in os.environ])
print(json.dumps(found))
"""


def report(*settings: dict[str, Any]) -> list[Any]:
    """What a process finds after each of the configurations, one after another."""
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"}
    done = subprocess.run(
        [sys.executable, "-c", REPORT, json.dumps(settings)],
        capture_output=True,
        text=True,
        env={**environment, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


@LINUX
def test_cores_and_threads() -> None:
    core = min(os.sched_getaffinity(0))
    first, again, other = report({"cpu_list": str(core), "threads": 3}, {"threads": 3}, {"threads": 2})
    threads, masks, line, changed = first
    assert (threads, masks, changed) == (3, [[core]], False)
    assert line.startswith(f"{core} of {os.cpu_count()}; 3 threads")
    assert again == first
    assert other == "threads is 2, but JAX's CPU backend is already running in this process, with 3"


@LINUX
@pytest.mark.skipif(not (NODES / "node0").exists(), reason="the kernel shows no NUMA nodes")
def test_numa_node() -> None:
    (found,) = report({"numa": 0})
    if isinstance(found, str):  # containers may forbid it
        assert found.startswith("numa: the memory cannot be bound to node 0: ")
        return
    assert found[0] == len(found[1][0])  # one thread a core
    assert {core for mask in found[1] for core in mask} <= node_cores(0)


@LINUX
def test_what_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no NUMA node 4096"):
        bind_process(EngineConfig(numa=4096))
    with pytest.raises(ConfigError, match="cpu_list names core 4096; this process may use "):
        bind_process(EngineConfig(cpu_list="0,4096"))
    if (NODES / "node0").exists():
        with pytest.raises(ConfigError, match="cpu_list names cores outside NUMA node 0, which has "):
            bind_process(EngineConfig(cpu_list="4096", numa=0))


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "1;2", "1-2-3", "٣"])
def test_bad_lists(text: str) -> None:
    with pytest.raises(ConfigError, match="cpu_list must be core numbers such as 0-3,8, not "):
        parse_cpu_list(text, source="cpu_list")


@pytest.mark.parametrize(("field", "value"), [("threads", -1), ("numa", -1), ("decode_steps", -1)])
def test_numbers_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be at least 0, not -1"):
        EngineConfig(**{field: value})


@given(st.frozensets(st.integers(0, 40), min_size=1))
def test_lists_are_read_as_written(cores: frozenset[int]) -> None:
    assert parse_cpu_list(format_cpu_list(cores), source="test") == cores
    assert format_cpu_list(frozenset({0, 1, 2, 3, 8})) == "0-3,8"


@LINUX
@pytest.mark.parametrize("error", [FileNotFoundError, ProcessLookupError])
def test_threads_that_end_meanwhile_are_not_counted(monkeypatch: pytest.MonkeyPatch, error: type[OSError]) -> None:
    def gone(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(Path, "read_text", gone)
    assert pool_threads() == 0


LIMITED = """
from unittest.mock import patch
from llmjax import cpu_affinity
from llmjax.config import EngineConfig
from llmjax.cpu_affinity import describe, pool_threads
with patch.object(cpu_affinity, "usable_cores", lambda: 1), patch.object(cpu_affinity, "_allowed", lambda: {0, 1, 2}):
    cpu_affinity.bind_process(EngineConfig())
    print(pool_threads(), describe())
"""


@LINUX
def test_a_limit_on_the_time_of_cores_sizes_xlas_pool() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    threads, _, line = done.stdout.strip().partition(" ")
    assert threads == "1" and "limited to the time of 1; 1 threads" in line


SHARES = """
import json, os, sys
from llmjax.config import EngineConfig
from llmjax.cpu_affinity import pool_threads
from llmjax.machine_share import MachineShare
from llmjax.platforms import select_platform
rank, settings = json.loads(sys.argv[1])
share = MachineShare(rank=rank, count=2, host_memory=2**50)
platform = select_platform(EngineConfig(data_parallel_size=2, **settings), share)
masks = {tuple(sorted(os.sched_getaffinity(int(task)))) for task in os.listdir("/proc/self/task")}
print(json.dumps([pool_threads(), sorted(masks), [device.id for device in platform.devices]]))
"""


@LINUX
@pytest.mark.parametrize(
    ("settings", "threads", "devices"),
    [({}, None, 1), ({"threads": 3}, 3, 1), ({"device_ids": "4,5,0,1", "threads": 2}, 2, 2)],
)
def test_two_engines_divide_cores_and_threads(settings: dict[str, Any], threads: int | None, devices: int) -> None:
    """What each has to run on; their devices are in the CPU, which each of them has for itself."""
    found = []
    for rank in range(2):
        done = subprocess.run(
            [sys.executable, "-c", SHARES, json.dumps([rank, settings])],
            capture_output=True,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    allowed = os.sched_getaffinity(0)
    (first, (mine,), ids), (second, (its,), others) = found
    assert set(mine) | set(its) <= allowed and mine and its
    if len(allowed) > 1:
        assert set(mine) | set(its) == allowed and not set(mine) & set(its)
    if threads is not None:
        assert max(first, devices) + max(second, devices) == max(threads, 2 * devices)  # XLA has one for each device
    assert ids == others == list(range(devices))


def test_threads_of_a_core_and_cores_of_a_node_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of two cores of two threads each, numbered as Linux does on many machines."""
    cores, nodes = tmp_path / "cpu", tmp_path / "node"
    for core in range(8):
        topology = cores / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    for node, listed in enumerate(("0,2,4,6", "1,3,5,7")):
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}" / "cpulist").write_text(listed + "\n")
    monkeypatch.setattr(cpu_affinity, "CORES", cores)
    monkeypatch.setattr(cpu_affinity, "NODES", nodes)
    assert cpu_affinity._in_order(frozenset(range(8))) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert cpu_affinity._in_order(frozenset({7, 6, 3})) == [6, 3, 7]
    monkeypatch.setattr(cpu_affinity, "CORES", tmp_path / "nothing")
    monkeypatch.setattr(cpu_affinity, "NODES", tmp_path / "nothing")
    assert cpu_affinity._in_order(frozenset({3, 1, 2})) == [1, 2, 3]
