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
from llmjax.cpu_affinity import (
    MACHINE,
    Binding,
    Topology,
    bind_process,
    binding_of,
    format_cpu_list,
    parse_cpu_list,
    pool_threads,
)
from llmjax.errors import ConfigError
from llmjax.machine_share import WHOLE_MACHINE, MachineShare
from tests.machines import two_nodes

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
@pytest.mark.skipif(0 not in MACHINE.nodes, reason="the kernel shows no NUMA nodes")
def test_numa_node() -> None:
    (found,) = report({"numa": [0]})
    if isinstance(found, str):  # containers may forbid it
        assert found.startswith("numa: the memory cannot be bound to node 0: ")
        return
    assert found[0] == len(found[1][0])  # one thread a core
    assert {core for mask in found[1] for core in mask} <= MACHINE.cores_of(0)


@LINUX
def test_what_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no NUMA node 4096"):
        bind_process(EngineConfig(numa=(4096,)))
    with pytest.raises(ConfigError, match="cpu_list names core 4096; this process may use "):
        bind_process(EngineConfig(cpu_list=f"{min(os.sched_getaffinity(0))},4096"))
    if 0 in MACHINE.nodes:
        with pytest.raises(ConfigError, match="cpu_list names cores outside NUMA node 0, which has "):
            bind_process(EngineConfig(cpu_list="4096", numa=(0,)))


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "1;2", "1-2-3", "٣"])
def test_bad_lists(text: str) -> None:
    with pytest.raises(ConfigError, match="cpu_list must be core numbers such as 0-3,8, not "):
        parse_cpu_list(text, source="cpu_list")


@pytest.mark.parametrize(("field", "value"), [("threads", -1), ("numa", (0, -1)), ("decode_steps", -1)])
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
import sys
from unittest.mock import patch
from llmjax import cpu_affinity
from llmjax.config import EngineConfig
from llmjax.cpu_affinity import describe, pool_threads
usable, physical = map(int, sys.argv[1:])
known = {"usable_cores": lambda: usable, "physical_cores": lambda: physical, "_allowed": lambda: {0, 1, 2}}
with patch.multiple(cpu_affinity, **known):
    cpu_affinity.bind_process(EngineConfig())
    print(pool_threads(), describe())
"""


@LINUX
@pytest.mark.parametrize(
    ("usable", "physical", "said"),
    [(1, 1, "limited to the time of 1; 1 threads"), (3, 2, "2 physical; 2 threads")],
)
def test_what_cores_can_do_sizes_xlas_pool(usable: int, physical: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(usable), str(physical)],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    threads, _, line = done.stdout.strip().partition(" ")
    assert threads == str(physical) and said in line


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
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (({}, None, 1), ({"threads": 3}, 3, 1))),
        ({"device_ids": "4,5,0,1", "threads": 2}, 2, 2),
    ],
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


def test_threads_of_a_core_and_cores_of_a_node_stay_together(tmp_path: Path) -> None:
    machine = two_nodes(tmp_path)
    assert machine.in_order(range(8)) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert machine.in_order({7, 6, 3}) == [6, 3, 7]
    assert Topology(tmp_path / "nothing").in_order({3, 1, 2}) == [1, 2, 3]


def bindings(count: int, machine: Topology, **settings: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Cores and nodes of each of several processes."""
    options = {"cpu_list": None, "numa": (), "allowed": frozenset(range(8)), "topology": machine, **settings}
    found = [binding_of(MachineShare(rank=rank, count=count), **options) for rank in range(count)]
    return [(format_cpu_list(one.cores or frozenset()), one.nodes) for one in found]


def test_nodes_of_processes(tmp_path: Path) -> None:
    machine = two_nodes(tmp_path)
    assert bindings(2, machine, numa=(0, 1)) == [("0,2,4,6", (0,)), ("1,3,5,7", (1,))]
    assert bindings(2, machine, numa=(1, 0)) == [("1,3,5,7", (1,)), ("0,2,4,6", (0,))]
    # of one node they divide the cores, threads of a core together
    assert bindings(4, machine, numa=(0, 0, 1, 1)) == [("0,4", (0,)), ("2,6", (0,)), ("1,5", (1,)), ("3,7", (1,))]
    assert bindings(3, machine, numa=(0, 1, 0)) == [("0,4", (0,)), ("1,3,5,7", (1,)), ("2,6", (0,))]
    assert bindings(2, machine, numa=(1,)) == [("1,5", (1,)), ("3,7", (1,))]
    # two devices each
    assert bindings(2, machine, numa=(0, 0, 1, 1)) == [("0,2,4,6", (0,)), ("1,3,5,7", (1,))]
    assert bindings(1, machine, numa=(0, 1)) == [("0-7", (0, 1))]
    assert bindings(2, machine, numa=(0, 1), cpu_list="0-3") == [("0,2", (0,)), ("1,3", (1,))]
    assert bindings(2, machine) == [("0,2,4,6", ()), ("1,3,5,7", ())]
    none: Any = {"cpu_list": None, "numa": (), "allowed": frozenset({0}), "topology": machine}
    assert binding_of(WHOLE_MACHINE, **none) == Binding(None, ())


def test_nodes_that_are_not_there(tmp_path: Path) -> None:
    machine = two_nodes(tmp_path)
    for rank in range(2):  # each process says it, whoever should have had the node
        share: Any = {"share": MachineShare(rank=rank, count=2), "cpu_list": None, "allowed": frozenset({0, 2})}
        with pytest.raises(ConfigError, match=r"^numa: this machine has no NUMA node 3 \(there is: 0, 1\)$"):
            binding_of(**share, numa=(0, 3), topology=machine)
    with pytest.raises(ConfigError, match=r"^this process may use no core of NUMA node 1$"):
        binding_of(**share, numa=(0, 1), topology=machine)
    share |= {"cpu_list": "0-1", "numa": (0,)}
    with pytest.raises(ConfigError, match=r"^cpu_list names cores outside NUMA node 0, which has 0,2,4,6$"):
        binding_of(**share, topology=machine)


@LINUX
def test_a_node_is_reached_from_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``numactl --cpunodebind=0``, before a program that binds each of its processes itself."""
    machine, before = two_nodes(tmp_path), os.sched_getaffinity(0)
    monkeypatch.setattr(cpu_affinity, "_bind_memory", lambda nodes: None)
    monkeypatch.setattr(cpu_affinity, "_bind_cores", lambda cores: None)
    monkeypatch.setattr(cpu_affinity, "_start_backend", lambda threads: None)
    try:
        # the kernel leaves out those that the container has not
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        here, there = (os.sched_getaffinity(0) & machine.cores_of(node) for node in (0, 1))
        if not here or not there:
            pytest.skip("the container has cores of one node alone")
        os.sched_setaffinity(0, here)
        found = bind_process(EngineConfig(numa=(1,)), topology=machine)
        assert os.sched_getaffinity(0) == here
    finally:
        os.sched_setaffinity(0, before)
    assert found == Binding(frozenset(there), (1,))


def test_one_node_for_all_or_for_each() -> None:
    assert EngineConfig(numa=(0, 1), data_parallel_size=2).numa == (0, 1)
    assert EngineConfig(numa=(0, 0, 1, 1), data_parallel_size=2, tensor_parallel_size=2).numa == (0, 0, 1, 1)
    with pytest.raises(ConfigError, match=r"^numa names 2 nodes, for 1 engine of 1 device: name one for all, or one"):
        EngineConfig(numa=(0, 1))
    with pytest.raises(ConfigError, match=r"^numa names 3 nodes, for 2 engines of 2 devices: name one for all, or one"):
        EngineConfig(numa=(0, 0, 1), data_parallel_size=2, tensor_parallel_size=2)
