"""Where on the CPU the engine runs: cores, threads, memory of NUMA nodes. Set before JAX starts its CPU backend, whose
threads inherit it. Linux only."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from llmjax.config import EngineConfig
from llmjax.errors import ConfigError
from llmjax.kernels.cpu.cores import physical_cores, usable_cores
from llmjax.machine_share import WHOLE_MACHINE, MachineShare

POOL_THREAD = "tf_XLAEigen"  # what Linux calls the threads that XLA computes on
# XLA's CPU client takes the size of its pool from here, else from the affinity mask; there is no option for it.
POOL_VARIABLE = "NPROC"
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # system call numbers; the C library does not export it
MPOL_BIND = 2  # linux/mempolicy.h: these nodes' memory only


@dataclass(frozen=True)
class Topology:
    """The machine's cores and NUMA nodes.

    Args:
        root: where Linux shows them.
    """

    root: Path = Path("/sys/devices/system")

    @property
    def nodes(self) -> list[int]:
        """NUMA nodes, if the kernel shows them."""
        return sorted(int(node.name.removeprefix("node")) for node in self.root.glob("node/node[0-9]*"))

    def cores_of(self, node: int) -> frozenset[int]:
        """Cores of a NUMA node.

        Raises:
            ConfigError: this machine has no such node.
        """
        path = self.root / "node" / f"node{node}" / "cpulist"
        if not path.exists():
            there = ", ".join(map(str, self.nodes)) or "none"
            raise ConfigError(f"numa: this machine has no NUMA node {node} (there is: {there})")
        text = path.read_text().strip()
        return parse_cpu_list(text, source=str(path)) if text else frozenset()

    def in_order(self, cores: Collection[int]) -> list[int]:
        """Cores such that those that share a NUMA node, and within it the threads of one physical core, are
        neighbors."""
        nodes = {core: node for node in self.nodes for core in self.cores_of(node)}

        def place(core: int) -> tuple[int, int, int]:
            siblings = self.root / "cpu" / f"cpu{core}" / "topology" / "thread_siblings_list"
            text = siblings.read_text().strip() if siblings.exists() else ""
            first = min(parse_cpu_list(text, source=str(siblings))) if text else core
            return nodes.get(core, 0), first, core

        return sorted(cores, key=place)


MACHINE = Topology()


@dataclass(frozen=True)
class Binding:
    """Where a process is to run.

    Attributes:
        cores: None: where it runs already.
        nodes: NUMA nodes whose memory it takes; (): of all.
        sharers: processes that take the memory of these nodes.
    """

    cores: frozenset[int] | None = None
    nodes: tuple[int, ...] = ()
    sharers: int = 1


def binding_of(
    share: MachineShare,
    *,
    cpu_list: str | None,
    numa: Sequence[int],
    allowed: frozenset[int],
    topology: Topology = MACHINE,
) -> Binding:
    """Which cores and nodes are those of a process. Those that have the same nodes divide their cores evenly.

    Args:
        share: this process's share of the machine, which equal processes divide.
        cpu_list, numa: as in ``EngineConfig``, for all of them.
        allowed: cores that they may use.

    Raises:
        ConfigError: there is no such core or node, or none is left.
    """
    if cpu_list is None and not numa and share.is_whole:
        return Binding()
    named = None if cpu_list is None else parse_cpu_list(cpu_list, source="cpu_list")
    cores_of = {node: topology.cores_of(node) for node in numa}
    if named is not None and numa and not named <= (local := frozenset[int]().union(*cores_of.values())):
        raise ConfigError(f"cpu_list names cores outside NUMA {_names(numa)}, which has {format_cpu_list(local)}")
    if named is not None and not named <= allowed:
        raise ConfigError(
            f"cpu_list names core {min(named - allowed)}; this process may use {format_cpu_list(allowed)}"
        )
    nodes_of = [frozenset(replace(share, rank=rank).part(numa)) for rank in range(share.count)]
    nodes = nodes_of[share.rank]
    cores = allowed if named is None else named
    if nodes:
        cores &= frozenset[int]().union(*(cores_of[node] for node in nodes))
        if not cores:
            raise ConfigError(f"this process may use no core of NUMA {_names(sorted(nodes))}")
    beside = [rank for rank, theirs in enumerate(nodes_of) if theirs == nodes]
    local_share = replace(share, rank=beside.index(share.rank), count=len(beside))
    return Binding(frozenset(local_share.part(topology.in_order(cores))), tuple(sorted(nodes)), len(beside))


def bind_process(config: EngineConfig, share: MachineShare = WHOLE_MACHINE, *, topology: Topology = MACHINE) -> Binding:
    """Ties this process to the cores and the memory that the configuration names, and sizes XLA's thread pool.

    Args:
        share: this engine's share of cores, nodes and threads, where several divide them.

    Returns:
        What it is tied to.

    Raises:
        ConfigError: there is no such core or node, or this system cannot do it.
    """
    total, linux = physical_cores(), sys.platform == "linux"
    # XLA sees neither a limit on the cores' time nor which of them are threads of one.
    limited = total < len(_allowed()) if linux else not share.is_whole
    binding = Binding()
    if linux or config.cpu_list is not None or config.numa:
        allowed = _allowed()
        if not all(topology.cores_of(node) & allowed for node in config.numa):
            allowed = _reachable()  # numactl has bound this process, which starts others, to the node of the first
        binding = binding_of(share, cpu_list=config.cpu_list, numa=config.numa, allowed=allowed, topology=topology)
        if binding.nodes:
            _bind_memory(binding.nodes)
        if binding.cores is not None:
            _bind_cores(binding.cores)
    if config.threads:
        _start_backend(len(share.part(range(config.threads))))
    elif limited:
        _start_backend(min(physical_cores(), len(share.part(range(total)))))
    elif not share.is_whole:
        _start_backend(physical_cores())
    return binding


def check_threads(config: EngineConfig, share: MachineShare = WHOLE_MACHINE, *, devices: int = 1) -> None:
    """Raises ConfigError if the backend runs with another number of threads: it was started before.

    Args:
        devices: how many devices JAX sees in the CPU; XLA has at least one thread for each.
    """
    running, wanted = pool_threads(), len(share.part(range(config.threads)))
    if config.threads and running is not None and running != max(wanted, devices):
        raise ConfigError(
            f"threads is {wanted}, but JAX's CPU backend is already running in this process, with {running}"
        )


def pool_threads() -> int | None:
    """Threads that XLA computes on; None where this cannot be seen."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return None
    return sum(_thread_name(task) == POOL_THREAD for task in tasks.iterdir())


def describe() -> str:
    """Cores, threads and NUMA nodes in a line."""
    parts = [f"{format_cpu_list(_allowed())} of {os.cpu_count()}"] if sys.platform == "linux" else [str(os.cpu_count())]
    if sys.platform == "linux" and (cores := usable_cores()) < len(_allowed()):
        parts.append(f"limited to the time of {cores}")
    if (cores := physical_cores()) < usable_cores():
        parts.append(f"{cores} physical")
    if threads := pool_threads():
        parts.append(f"{threads} threads")
    if len(nodes := MACHINE.nodes) > 1:
        parts += [f"NUMA node {node}: {format_cpu_list(MACHINE.cores_of(node))}" for node in nodes]
    return "; ".join(parts)


def parse_cpu_list(text: str, *, source: str) -> frozenset[int]:
    """Core numbers as in ``0-3,8``.

    Args:
        source: what the error names.

    Raises:
        ConfigError: the text is not such a list.
    """
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ConfigError(f"{source} must be core numbers such as 0-3,8, not {text!r}")
        cores.update(range(first, last + 1))
    return frozenset(cores)


def format_cpu_list(cores: frozenset[int]) -> str:
    """The shortest text that ``parse_cpu_list`` takes."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and runs[-1][-1] == core - 1:
            runs[-1][1:] = [core]
        else:
            runs.append([core])
    return ",".join("-".join(map(str, run)) for run in runs)


def _names(nodes: Iterable[int]) -> str:
    numbers = sorted(set(nodes))
    return f"node{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _allowed() -> frozenset[int]:
    if sys.platform != "linux":
        raise ConfigError("cpu_list and numa need Linux")
    return frozenset(os.sched_getaffinity(0))


def _reachable() -> frozenset[int]:
    """Cores that this process may bind itself to, wherever it runs now: those of its cgroup."""
    bound = _allowed()
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        return _allowed()
    finally:
        os.sched_setaffinity(0, bound)


def half_of_cores() -> list[int]:
    """Half of what this process may use at once, at least one: the last ones of those that it may run on."""
    usable = usable_cores()
    cores = sorted(_allowed()) if sys.platform == "linux" else range(usable)
    return list(cores)[-max(1, usable // 2) :]


def unbound_cores() -> frozenset[int]:
    """All cores of the machine; none, where this process may not use all of them, or the system does not say."""
    if sys.platform != "linux":
        return frozenset()
    allowed = _allowed()
    return allowed if len(allowed) == os.cpu_count() else frozenset()


def _bind_cores(cores: frozenset[int]) -> None:
    if sys.platform == "linux":
        for task in os.listdir("/proc/self/task"):  # libraries have started threads already
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(task), cores)


def _bind_memory(nodes: Sequence[int]) -> None:
    number = SET_MEMPOLICY.get(platform.machine())
    if sys.platform != "linux" or number is None:
        raise ConfigError(f"numa is not supported on {platform.system()} {platform.machine()}")
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (max(nodes) // bits + 1))()
    for node in nodes:
        mask[node // bits] |= 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is told (set_mempolicy(2), bugs).
    if libc.syscall(number, MPOL_BIND, ctypes.byref(mask), ctypes.c_ulong(len(mask) * bits + 1)):
        why = os.strerror(ctypes.get_errno())
        raise ConfigError(f"numa: the memory cannot be bound to {_names(nodes)}: {why}")


def _start_backend(threads: int) -> None:
    """Starts JAX's CPU backend with this many threads, if it does not run yet."""
    import jax

    before = os.environ.get(POOL_VARIABLE)
    os.environ[POOL_VARIABLE] = str(threads)
    try:
        jax.devices("cpu")
    finally:
        if before is None:
            del os.environ[POOL_VARIABLE]
        else:
            os.environ[POOL_VARIABLE] = before


def _thread_name(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""  # it has just ended
