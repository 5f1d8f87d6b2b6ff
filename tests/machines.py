"""Machines as Linux would show them."""

from __future__ import annotations

from pathlib import Path

from llmjax.cpu_affinity import Topology


def two_nodes(folder: Path) -> Topology:
    """Two nodes of two cores of two threads each, numbered as on many machines."""
    for core in range(8):
        topology = folder / "cpu" / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    for node, listed in enumerate(("0,2,4,6", "1,3,5,7")):
        (folder / "node" / f"node{node}").mkdir(parents=True)
        (folder / "node" / f"node{node}" / "cpulist").write_text(listed + "\n")
    return Topology(folder)
