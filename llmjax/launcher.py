"""Processes that mpiexec or srun has started: which rank each of them is, as the launcher says in environment
variables, and the settings that follow from it.

Open MPI sets ``OMPI_COMM_WORLD_*`` (https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html), Hydra, which
starts the ranks of MPICH and Intel MPI, ``PMI_*`` and ``MPI_LOCAL*``, and Slurm ``SLURM_*`` in the steps of srun.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmjax.config import parse_device_ids
from llmjax.cpu_affinity import MACHINE, Topology, binding_of, format_cpu_list, unbound_cores
from llmjax.errors import ConfigError
from llmjax.machine_share import MachineShare

logger = logging.getLogger(__name__)

VISIBLE_CARDS = "CUDA_VISIBLE_DEVICES"
STEP = ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """What has started this process, beside others of one program.

    Attributes:
        name: what people call it.
        size, rank, local_size, local_rank: environment variables that hold them; ``local``: on this machine.
    """

    name: str
    size: str
    rank: str
    local_size: str | None
    local_rank: str

    def found(self, environment: Mapping[str, str]) -> bool:
        """Whether it has started this process."""
        names = (self.size, self.rank, self.local_rank, *([] if self.local_size is None else [self.local_size]))
        return all(name in environment for name in names)


OPEN_MPI = Launcher(
    name="mpiexec of Open MPI",
    size="OMPI_COMM_WORLD_SIZE",
    rank="OMPI_COMM_WORLD_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
)
HYDRA = Launcher(
    name="mpiexec of MPICH or Intel MPI",
    size="PMI_SIZE",
    rank="PMI_RANK",
    local_size="MPI_LOCALNRANKS",
    local_rank="MPI_LOCALRANKID",
)
SLURM = Launcher(
    name="srun", size="SLURM_STEP_NUM_TASKS", rank="SLURM_PROCID", local_size=None, local_rank="SLURM_LOCALID"
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which of several processes this is.

    Attributes:
        share: this process's share of the machine.
        address: where the others find rank 0; None: the launcher does not say.
    """

    launcher: Launcher
    rank: int
    size: int
    share: MachineShare
    address: str | None

    @property
    def is_one_machine(self) -> bool:
        """All processes are here."""
        return self.share.count == self.size


def place_of(environment: Mapping[str, str]) -> Place | None:
    """Where this process stands among those that were started together; None: it was started by itself.

    Raises:
        ConfigError: a variable of a launcher is not what it should be.
    """
    by_mpi = next((_place(one, environment) for one in (OPEN_MPI, HYDRA) if one.found(environment)), None)
    by_slurm = None
    if SLURM.found(environment) and all(name in environment for name in STEP):
        by_slurm = _place(SLURM, environment)
    if by_mpi is None or by_slurm is None:
        return by_mpi or by_slurm
    # Ranks that srun itself has started with MPI's variables; else srun has started what mpiexec starts ranks by.
    return by_slurm if (by_mpi.rank, by_mpi.size) == (by_slurm.rank, by_slurm.size) else by_mpi


def launched(**given: Any) -> dict[str, Any]:
    """Settings for ``LLM`` in a program that mpiexec or srun may have started several times: ``LLM(**launched(…))``.

    Args:
        given: settings that are the same everywhere.

    Returns:
        These, and what the launcher says: which rank this is, where rank 0 is, which devices and cores it has.

    Raises:
        ConfigError: as ``launched_settings``.
    """
    settings, line = launched_settings(given)
    if line is not None:
        logger.info("%s", line)
    return {**given, **settings}


def launched_settings(
    given: Mapping[str, Any],
    *,
    environment: Mapping[str, str] = os.environ,
    cores: frozenset[int] | None = None,
    topology: Topology = MACHINE,
) -> tuple[dict[str, Any], str | None]:
    """The settings of a process that mpiexec or srun may have started.

    Args:
        given: those that are known, by field of ``EngineConfig``, for all processes alike.
        environment: environment variables of the process.
        cores: cores that this machine's ranks divide, none if the launcher divided them; None: what the system says.

    Returns:
        Settings that win over those given, and a line that says what was found; none where there is but one process.

    Raises:
        ConfigError: settings that are given contradict the launcher, or it does not say where rank 0 is.
    """
    place = place_of(environment)
    if place is None or place.size == 1:
        return {}, None
    _check(place, given)
    settings: dict[str, Any] = {"nnodes": place.size, "node_rank": place.rank}
    if given.get("multi_process"):
        settings["multi_process"] = False  # they are there already
    if "master_addr" not in given and not place.is_one_machine:
        if place.address is None:
            raise ConfigError(
                f"{place.launcher.name} has started {place.size} ranks, {place.share.count} of them here, and does not "
                "say where rank 0 is: name its machine (master_addr)"
            )
        settings["master_addr"] = place.address
    devices = _devices(place, given, environment)
    if devices is not None:
        settings["device_ids"] = ",".join(map(str, devices))
    if given.get("tensor_parallel_size") is None and not _is_staged(given):
        settings["tensor_parallel_size"] = place.size * (1 if devices is None else len(devices))
    settings |= _binding(place, given, unbound_cores() if cores is None else cores, topology)
    address = settings.get("master_addr", given.get("master_addr"))
    where = "on this machine" if address is None else f"at {address}"
    return settings, f"{place.launcher.name} has started this as rank {place.rank} of {place.size}; rank 0 is {where}"


def _check(place: Place, given: Mapping[str, Any]) -> None:
    for name, variable, value in (
        ("nnodes", place.launcher.size, place.size),
        ("node_rank", place.launcher.rank, place.rank),
    ):
        if given.get(name, value) != value:
            raise ConfigError(
                f"{name} is {given[name]}, and {variable}, which {place.launcher.name} has set, is {value}: leave "
                f"{name} out, or start the program without {place.launcher.name.split()[0]}"
            )
    started = f"rank {place.rank}: {place.launcher.name} has started {place.size} ranks"
    stages, size = given.get("pipeline_parallel_size", 1), given.get("tensor_parallel_size")
    if stages > 1 and stages != place.size:
        raise ConfigError(f"{started}, and pipeline_parallel_size is {stages}: each stage is a rank, so start {stages}")
    if stages == 1 and size is not None and size % place.size:
        raise ConfigError(
            f"{started}, which cannot have equal numbers of the {size} devices of tensor_parallel_size: start as many "
            "ranks as divide it, or leave it out"
        )
    if given.get("data_parallel_size", 1) > 1:
        raise ConfigError(
            f"data_parallel_size is {given['data_parallel_size']}, and {place.launcher.name} has started "
            f"{place.size} processes to run one engine ({place.launcher.size}): leave one of them out"
        )


def _devices(place: Place, given: Mapping[str, Any], environment: Mapping[str, str]) -> list[int] | None:
    """The numbers of this rank's devices; None: the first ones of its machine, of which it has all."""
    share = place.share
    if (named := given.get("device_ids")) is not None:
        numbers = parse_device_ids(named)
        if len(numbers) % share.count:
            raise ConfigError(
                f"device_ids names {len(numbers)} devices, which the {share.count} ranks that {place.launcher.name} "
                "has started on this machine cannot divide evenly"
            )
        return list(share.part(numbers))
    size: int | None = given.get("tensor_parallel_size")
    each = size or 1 if _is_staged(given) else max(1, (size or place.size) // place.size)
    cards = environment.get(VISIBLE_CARDS)
    if cards is not None and len(cards.split(",")) <= each:  # the launcher has divided them
        return list(range(each))
    return None if share.is_whole else list(range(share.rank * each, (share.rank + 1) * each))


def _is_staged(given: Mapping[str, Any]) -> bool:
    """Whether each rank has some of the layers, and tensor_parallel_size is that of each."""
    return bool(given.get("pipeline_parallel_size", 1) > 1)


def _binding(place: Place, given: Mapping[str, Any], cores: frozenset[int], topology: Topology) -> dict[str, Any]:
    """What of this machine's cores, threads and NUMA nodes the rank has, as settings."""
    share, numa, cpu_list = place.share, given.get("numa") or (), given.get("cpu_list")
    if len(numa) > 1 and len(numa) % share.count:
        raise ConfigError(
            f"numa names {len(numa)} nodes, which the {share.count} ranks that {place.launcher.name} has started on "
            "this machine cannot divide evenly"
        )
    if share.is_whole:
        return {}
    settings: dict[str, Any] = {}
    if given.get("threads"):
        settings["threads"] = len(share.part(range(given["threads"])))
    if not cores:  # the launcher has divided them
        return settings | ({"numa": list(share.part(numa))} if numa else {})
    binding = binding_of(share, cpu_list=cpu_list, numa=numa, allowed=cores, topology=topology)
    if binding.cores is not None:
        settings["cpu_list"] = format_cpu_list(binding.cores)
    return settings | ({"numa": list(binding.nodes)} if binding.nodes else {})


def _place(launcher: Launcher, environment: Mapping[str, str]) -> Place:
    def number(name: str) -> int:
        text = environment[name]
        if not re.fullmatch(r"\d{1,6}", text, re.ASCII):
            raise ConfigError(f"{name} of {launcher.name} must be a number, not {text!r}")
        return int(text)

    size, rank, local_rank = number(launcher.size), number(launcher.rank), number(launcher.local_rank)
    if launcher.local_size is not None:
        local_size, address = number(launcher.local_size), None
    else:
        tasks = _tasks_by_node(environment["SLURM_STEP_TASKS_PER_NODE"])
        node = number("SLURM_NODEID")
        local_size = tasks[node] if node < len(tasks) else 0
        address = first_host(environment["SLURM_STEP_NODELIST"])
    if not (rank < size and local_rank < local_size <= size):
        raise ConfigError(
            f"{launcher.name} says that this is rank {rank} of {size} ({launcher.rank}, {launcher.size}), and "
            f"{local_rank} of {local_size} on its machine: that cannot be"
        )
    return Place(
        launcher=launcher, rank=rank, size=size, share=MachineShare(rank=local_rank, count=local_size), address=address
    )


def first_host(nodes: str) -> str:
    """The first of a list of hosts as Slurm writes it: ``node[007-009,12]-a,other``.

    Raises:
        ConfigError: it is not a list of hosts.
    """
    match = re.fullmatch(r"([^][,\s]*)(?:\[(\d+)[^][\s]*\]([^][,\s]*))?(?:,\S*)?", nodes, re.ASCII)
    host = "" if match is None else "".join(part or "" for part in match.groups())
    if not host:
        raise ConfigError(f"SLURM_STEP_NODELIST of srun must be a list of hosts such as node[01-04], not {nodes!r}")
    return host


def _tasks_by_node(text: str) -> list[int]:
    """Numbers in Slurm's notation: ``2(x3),1`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part, re.ASCII)
        if match is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE of srun must be numbers such as 2(x3),1, not {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
