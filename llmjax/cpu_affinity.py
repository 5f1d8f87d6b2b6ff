"""Where on the CPU the engine runs: cores, threads, memory of a NUMA node. Set before JAX starts its CPU backend, whose
threads inherit it. Linux only."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from contextlib import suppress
from pathlib import Path

from llmjax.config import EngineConfig
from llmjax.errors import ConfigError
from llmjax.kernels.cpu.cores import usable_cores
from llmjax.machine_share import WHOLE_MACHINE, MachineShare

POOL_THREAD = "tf_XLAEigen"  # what Linux calls the threads that XLA computes on
# XLA's CPU client takes the size of its pool from here, else from the affinity mask; there is no option for it.
POOL_VARIABLE = "NPROC"
NODES = Path("/sys/devices/system/node")
CORES = Path("/sys/devices/system/cpu")
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # system call numbers; the C library does not export it
MPOL_BIND = 2  # linux/mempolicy.h: this node's memory only


def bind_process(config: EngineConfig, share: MachineShare = WHOLE_MACHINE) -> None:
    """Ties this process to the cores and the memory that the configuration names, and sizes XLA's thread pool.

    Args:
        share: of cores and threads, where several engines divide them.

    Raises:
        ConfigError: there is no such core or node, or this system cannot do it.
    """
    cores = parse_cpu_list(config.cpu_list, source="cpu_list") if config.cpu_list is not None else None
    if config.numa is not None:
        local = node_cores(config.numa)
        if cores is not None and not cores <= local:
            raise ConfigError(
                f"cpu_list names cores outside NUMA node {config.numa}, which has {format_cpu_list(local)}"
            )
        cores = cores or local & _allowed()
        if not cores:
            raise ConfigError(f"this process may use no core of NUMA node {config.numa}")
        _bind_memory(config.numa)
    if cores is not None:
        _bind_cores(cores)
    # XLA sees the affinity mask, but not a limit on the cores' time.
    limited = sys.platform == "linux" and usable_cores() < len(_allowed())
    threads = config.threads or (usable_cores() if limited or not share.is_whole else 0)
    if not share.is_whole and sys.platform == "linux":
        _bind_cores(frozenset(share.part(_in_order(_allowed()))))
    if threads:
        _start_backend(len(share.part(range(threads))))


def check_threads(config: EngineConfig, share: MachineShare = WHOLE_MACHINE, *, devices: int = 1) -> None:
    """Raises ConfigError if the backend runs with another number of threads: it was started before.

    Args:
        devices: that the CPU is to JAX; XLA has a thread for each, at least.
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
    if threads := pool_threads():
        parts.append(f"{threads} threads")
    if len(nodes := _nodes()) > 1:
        parts += [f"NUMA node {node}: {format_cpu_list(node_cores(node))}" for node in nodes]
    return "; ".join(parts)


def node_cores(node: int) -> frozenset[int]:
    """Cores of a NUMA node.

    Raises:
        ConfigError: this machine has no such node.
    """
    path = NODES / f"node{node}" / "cpulist"
    if not path.exists():
        there = ", ".join(map(str, _nodes())) or "none"
        raise ConfigError(f"numa: this machine has no NUMA node {node} (there is: {there})")
    text = path.read_text().strip()
    return parse_cpu_list(text, source=str(path)) if text else frozenset()


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


def _allowed() -> frozenset[int]:
    if sys.platform != "linux":
        raise ConfigError("cpu_list and numa need Linux")
    return frozenset(os.sched_getaffinity(0))


def _nodes() -> list[int]:
    """The machine's NUMA nodes, if its kernel shows them."""
    return sorted(int(node.name.removeprefix("node")) for node in NODES.glob("node[0-9]*"))


def _in_order(cores: frozenset[int]) -> list[int]:
    """Cores such that those that share a NUMA node, and within it the threads of one physical core, are neighbors."""
    nodes = {core: node for node in _nodes() for core in node_cores(node)}

    def place(core: int) -> tuple[int, int, int]:
        siblings = CORES / f"cpu{core}" / "topology" / "thread_siblings_list"
        first = min(parse_cpu_list(siblings.read_text().strip(), source=str(siblings))) if siblings.exists() else core
        return nodes.get(core, 0), first, core

    return sorted(cores, key=place)


def _bind_cores(cores: frozenset[int]) -> None:
    allowed = _allowed()
    if not cores <= allowed:
        raise ConfigError(
            f"cpu_list names core {min(cores - allowed)}; this process may use {format_cpu_list(allowed)}"
        )
    if sys.platform == "linux":
        for task in os.listdir("/proc/self/task"):  # libraries have started threads already
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(task), cores)


def _bind_memory(node: int) -> None:
    number = SET_MEMPOLICY.get(platform.machine())
    if sys.platform != "linux" or number is None:
        raise ConfigError(f"numa is not supported on {platform.system()} {platform.machine()}")
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is told (set_mempolicy(2), bugs).
    if libc.syscall(number, MPOL_BIND, ctypes.byref(mask), ctypes.c_ulong(len(mask) * bits + 1)):
        raise ConfigError(f"numa: the memory cannot be bound to node {node}: {os.strerror(ctypes.get_errno())}")


def _start_backend(threads: int) -> None:
    """Starts JAX's CPU backend with so many threads, if it does not run yet."""
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
