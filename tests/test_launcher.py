"""Processes that mpiexec or srun has started find out which they are; what contradicts it is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmjax.cli.serve import parse
from llmjax.config import EngineConfig
from llmjax.cpu_affinity import Topology
from llmjax.errors import ConfigError
from llmjax.launcher import first_host, launched_settings, place_of
from tests.machines import two_nodes

CORES = frozenset(range(8))


def open_mpi(rank: int, size: int, *, local: tuple[int, int] | None = None) -> dict[str, str]:
    number, count = local or (rank, size)
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(number),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(count),
    }


def hydra(rank: int, size: int, *, local: tuple[int, int] | None = None) -> dict[str, str]:
    number, count = local or (rank, size)
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(number),
        "MPI_LOCALNRANKS": str(count),
    }


def slurm(rank: int, size: int, *, local: int, node: int, tasks: str, nodes: str) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_NTASKS": str(size),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_STEP_NODELIST": nodes,
    }


def settings_of(
    environment: dict[str, str], cores: frozenset[int] = frozenset(), topology: Topology | None = None, **given: Any
) -> dict[str, Any]:
    found, line = launched_settings(given, environment=environment, cores=cores, topology=topology or Topology())
    assert (line is None) == (not found)
    if found:
        EngineConfig(**{**given, **found})  # holds together
    return found


@pytest.mark.parametrize("by", [open_mpi, hydra])
def test_ranks_of_mpiexec(by: Any) -> None:
    for rank in range(3):
        assert settings_of(by(rank, 3)) == {
            "nnodes": 3,
            "node_rank": rank,
            "tensor_parallel_size": 3,
            "device_ids": str(rank),
        }
    two_each = settings_of(by(3, 4, local=(1, 2)), tensor_parallel_size=8, master_addr="a")
    assert two_each == {"nnodes": 4, "node_rank": 3, "device_ids": "2,3"}


def test_a_process_by_itself() -> None:
    assert place_of({}) is None
    assert launched_settings({}, environment={}) == ({}, None)
    assert launched_settings({"nnodes": 2}, environment=open_mpi(0, 1)) == ({}, None)
    batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert place_of(batch_script) is None


def test_ranks_of_srun() -> None:
    for rank, (node, local) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]):
        told = slurm(rank, 5, local=local, node=node, tasks="2(x2),1", nodes="gpu[08-10]")
        found = settings_of(told)
        assert (found["nnodes"], found["node_rank"], found["master_addr"]) == (5, rank, "gpu08")
        assert found.get("device_ids") == (None if node == 2 else str(local))
    one_machine = settings_of(slurm(1, 2, local=1, node=0, tasks="2", nodes="gpu08"))
    assert "master_addr" not in one_machine
    line = launched_settings({}, environment=told)[1]
    assert line == "srun has started this as rank 4 of 5; rank 0 is at gpu08"


def test_mpi_within_slurm() -> None:
    # srun has started a daemon on each node, and these the ranks
    daemon = slurm(1, 2, local=0, node=1, tasks="1(x2)", nodes="a,b")
    place = place_of(daemon | hydra(3, 4, local=(1, 2)))
    assert place is not None and (place.rank, place.size, place.address) == (3, 4, None)
    # srun has started the ranks and told them what MPI wants to know, too
    place = place_of(daemon | hydra(1, 2, local=(0, 1)))
    assert place is not None and (place.rank, place.size, place.address) == (1, 2, "a")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node7,other", "node7"),
        ("node[007-015,20],other", "node007"),
        ("node[3,5]", "node3"),
        ("rack1-[02-09]-ib.site", "rack1-02-ib.site"),
        ("[1-3]", "1"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", "a[", "a[x]", "a b", "[]"])
def test_no_list_of_hosts(nodes: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST of srun must be a list of hosts"):
        first_host(nodes)


def refused(environment: dict[str, str], **given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        settings_of(environment, **given)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_contradictions_name_both() -> None:
    assert refused(open_mpi(1, 2), nnodes=3) == (
        "nnodes is 3, and OMPI_COMM_WORLD_SIZE, which mpiexec of Open MPI has set, is 2: leave nnodes out, or start "
        "the program without mpiexec"
    )
    assert refused(hydra(1, 2), node_rank=0).startswith("node_rank is 0, and PMI_RANK, which mpiexec of MPICH or Intel")
    assert refused(open_mpi(1, 2), data_parallel_size=2).startswith("data_parallel_size is 2, and mpiexec of Open MPI")
    assert refused(open_mpi(1, 2), device_ids="0,1,2").startswith("device_ids names 3 devices, which the 2 ranks that")
    assert refused(open_mpi(1, 2), numa=[0, 0, 1]).startswith("numa names 3 nodes, which the 2 ranks that mpiexec of")
    agreed = settings_of(open_mpi(1, 2), nnodes=2, node_rank=1, multi_process=True, tensor_parallel_size=2)
    assert agreed["multi_process"] is False


def test_what_a_launcher_does_not_say() -> None:
    message = refused(hydra(2, 4, local=(0, 2)))
    assert message.startswith(
        "mpiexec of MPICH or Intel MPI has started 4 ranks, 2 of them here, and does not say where"
    )
    assert refused(open_mpi(0, 2) | {"OMPI_COMM_WORLD_RANK": "x"}) == (
        "OMPI_COMM_WORLD_RANK of mpiexec of Open MPI must be a number, not 'x'"
    )
    assert refused(open_mpi(2, 2)).endswith("and 2 of 2 on its machine: that cannot be")
    assert refused(slurm(1, 2, local=0, node=0, tasks="two", nodes="a")).startswith("SLURM_STEP_TASKS_PER_NODE of srun")


def test_a_number_of_ranks_that_does_not_fit_is_said_by_each() -> None:
    for rank in range(3):
        with pytest.raises(ConfigError) as caught:
            settings_of(open_mpi(rank, 3), tensor_parallel_size=2)
        assert str(caught.value).startswith(
            f"rank {rank}: mpiexec of Open MPI has started 3 ranks, which cannot have equal numbers of the 2 devices"
        )
        with pytest.raises(
            ConfigError, match=f"^rank {rank}: mpiexec .* 3 ranks, and pipeline_parallel_size is 2: each"
        ):
            settings_of(hydra(rank, 3), pipeline_parallel_size=2)


def test_devices_of_a_machine_are_divided() -> None:
    told = open_mpi(6, 8, local=(2, 4))
    found = settings_of(told, device_ids="0,1,2,3,4,5,6,7", master_addr="a", multi_process=True)
    assert (found["device_ids"], found["tensor_parallel_size"]) == ("4,5", 16)
    # Slurm shows each task the cards that it has
    assert settings_of(open_mpi(1, 2) | {"CUDA_VISIBLE_DEVICES": "3"})["device_ids"] == "0"
    assert settings_of(open_mpi(1, 2) | {"CUDA_VISIBLE_DEVICES": "2,3"})["device_ids"] == "1"


def test_cores_and_nodes_of_a_machine_are_divided(tmp_path: Path) -> None:
    machine = two_nodes(tmp_path)
    first, second = (settings_of(open_mpi(rank, 2), CORES, machine) for rank in range(2))
    assert (first["cpu_list"], second["cpu_list"]) == ("0,2,4,6", "1,3,5,7")
    found = [settings_of(open_mpi(rank, 4), CORES, machine, numa=[0, 0, 1, 1]) for rank in range(4)]
    assert [(each["numa"], each["cpu_list"]) for each in found] == [
        ([0], "0,4"),
        ([0], "2,6"),
        ([1], "1,5"),
        ([1], "3,7"),
    ]
    bound = settings_of(open_mpi(1, 2), frozenset(), machine, numa=[0, 1], threads=5)  # by the launcher
    assert (bound["numa"], bound["threads"]) == ([1], 3) and "cpu_list" not in bound
    named = settings_of(open_mpi(1, 2), CORES, machine, cpu_list="0,4,1")
    assert named["cpu_list"] == "1,4"


def test_the_command_line_knows_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in hydra(1, 2).items():
        monkeypatch.setenv(name, value)
    engine = parse(["some-model", "--master-port", "4000"]).engine
    assert (engine.nnodes, engine.node_rank, engine.master_port, engine.device_ids) == (2, 1, 4000, "1")
    said = capsys.readouterr().err
    assert said == (
        "llmjax: note: mpiexec of MPICH or Intel MPI has started this as rank 1 of 2; rank 0 is on this machine\n"
    )
    with pytest.raises(
        ConfigError, match="nnodes is 4, and PMI_SIZE, which mpiexec of MPICH or Intel MPI has set, is 2"
    ):
        parse(["some-model", "--nnodes", "4"])
