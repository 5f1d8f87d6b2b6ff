"""Connects JAX's processes, so that each sees the devices of all."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
from jax._src import distributed, xla_bridge  # there is no public way to say where gloo listens
from jaxlib import _jax  # type: ignore[attr-defined]  # it has no types

from llmjax import jax_settings
from llmjax.config import EngineConfig
from llmjax.errors import ConfigError

SHUTDOWN_SECONDS = 5
HEARTBEAT_SECONDS = 30  # JAX's coordinator takes a process for dead that gives no sign of life for so long


class Waiting(Protocol):
    """A group that stops waiting for its ranks when it ends."""

    def unless_lost(self, wait: Callable[[], Any]) -> Any:
        """Returns what ``wait`` returns; raises EngineDead if a rank goes meanwhile."""


def initialize(group: Waiting, config: EngineConfig, *, port: int, address: str) -> None:
    """Connects this process, as rank ``node_rank``, to those of the other ranks.

    Args:
        port: where JAX's coordinator listens, at rank 0.
        address: where the other ranks reach this process.

    Raises:
        ConfigError: the ranks do not find each other in time.
        EngineDead: a rank has gone meanwhile.
    """
    host = f"[{config.master_addr}]" if ":" in config.master_addr else config.master_addr
    jax_settings.outlive_ranks()
    rank = config.node_rank
    connect = partial(
        jax.distributed.initialize,
        coordinator_address=f"{host}:{port}",
        num_processes=config.nnodes,
        process_id=rank,
        initialization_timeout=int(config.distributed_timeout_seconds),
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        coordinator_bind_address=f"{host}:{port}" if rank == 0 and _is_loopback(config.master_addr) else None,
    )
    try:
        group.unless_lost(connect)
    except RuntimeError as error:
        raise ConfigError(f"rank {rank} does not meet the others: {' '.join(str(error).split())}") from error

    def cpu_client() -> Any:
        # By itself, gloo takes the address of the machine's name, which may have none, or one of another network.
        client = distributed.global_state.client
        gloo = _jax.make_gloo_tcp_collectives(distributed_client=client, hostname=address)
        return group.unless_lost(lambda: xla_bridge.make_cpu_client(gloo))

    xla_bridge.register_backend_factory("cpu", cpu_client, priority=0, fail_quietly=False)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
