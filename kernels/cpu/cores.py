"""How many threads are of use to this process. Alone in its file, because the kernels' build runs it before anything is
installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc/self")
CPUS = Path("/sys/devices/system/cpu")


def usable_cores(proc: Path = PROC) -> int:
    """Cores that this process may use at once: those of its affinity mask, or fewer where a cgroup limits their time.

    Args:
        proc: what Linux shows of the process; elsewhere there is none.

    Returns:
        At least 1; part of a core counts as one.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return max(1, min([allowed, *_quotas(proc)]))


def physical_cores(proc: Path = PROC, cpus: Path = CPUS) -> int:
    """`usable_cores`, of which those that are threads of one physical core count once: they share its arithmetic, so
    that products are no faster with both, and a thread that waits takes from one that works.

    Args:
        cpus: what Linux shows of the machine's cores; where it shows nothing, each is one of its own.
    """
    if not hasattr(os, "sched_getaffinity"):
        return usable_cores(proc)
    lists = (cpus / f"cpu{core}" / "topology" / "thread_siblings_list" for core in os.sched_getaffinity(0))
    return max(1, min(usable_cores(proc), len({_text(path) or str(path) for path in lists})))


def groups_above(proc: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The cgroups that a process is in, the innermost first, as folders, and which version they are of (cgroups(7)).

    Args:
        proc: what Linux shows of the process.
        controller: the cgroup controller that they belong to, such as ``cpu``.
    """
    try:
        groups = (proc / "cgroup").read_text().splitlines()
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return
    paths = {tuple(controllers.split(",")): path for _, controllers, path in (line.split(":", 2) for line in groups)}
    for line in mounts:
        mount, _, kind = line.partition(" - ")
        root, at = mount.split()[3:5]
        system, _, options = kind.split()[:3]
        for controllers, path in paths.items():
            if system == "cgroup2" and controllers == ("",):
                version = 2
            elif system == "cgroup" and controller in controllers and controller in options.split(","):
                version = 1
            else:
                continue
            # A container sees its own group as the root of the mount.
            inside = Path(path).relative_to(root) if Path(path).is_relative_to(root) else ""
            folder = Path(at, inside)
            for group in (folder, *folder.parents):
                if not group.is_relative_to(at):
                    break
                yield group, version


def _quotas(proc: Path) -> Iterator[int]:
    """Cores' worth of time that each cgroup above the process grants, rounded up."""
    for group, version in groups_above(proc, "cpu"):
        if (quota := _quota_2(group) if version == 2 else _quota_1(group)) is not None:
            yield quota


def _quota_2(group: Path) -> int | None:
    quota, _, period = _text(group / "cpu.max").partition(" ")
    return _cores(quota, period)


def _quota_1(group: Path) -> int | None:
    return _cores(_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us"))


def _cores(quota: str, period: str) -> int | None:
    """Cores of two numbers in microseconds; None where the first is ``max``, -1 or not there: no limit."""
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return None
    return -(-int(quota) // int(period))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
