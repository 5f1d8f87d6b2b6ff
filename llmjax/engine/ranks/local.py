"""The other ranks of a group as processes of this machine, started by rank 0 (``--multi-process``,
``--pipeline-parallel-size``)."""

from __future__ import annotations

import logging
import secrets
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from llmjax.config import EngineConfig
from llmjax.engine.clients.process import python_environment, signals_held_back
from llmjax.engine.clients.wire import Start
from llmjax.engine.ranks.join import free_port
from llmjax.errors import ConfigError
from llmjax.host_memory import free_memory
from llmjax.machine_share import MachineShare

LOOPBACK = "127.0.0.1"
LEAVE_SECONDS = 2.0  # how long a worker may take to end by itself


class LocalRanks:
    """Starts a process for each device but the first, or for each stage but that of rank 0; they end with this one.

    Args:
        config: configuration of one process with all devices.

    Attributes:
        config: configuration of rank 0.
        share: the part of the machine that rank 0 gets.
    """

    def __init__(self, config: EngineConfig) -> None:
        numbers = config.device_numbers
        count = config.pipeline_parallel_size if config.is_staged else len(numbers)
        ranks = config.replace(
            multi_process=False,
            tensor_parallel_size=config.tensor_parallel_size if config.is_staged else count,
            device_ids=None,
            nnodes=count,
            master_addr=LOOPBACK,
            master_port=free_port(LOOPBACK),
            master_secret=secrets.token_hex(),
        )
        memory = free_memory() // count
        self.share, *others = (MachineShare(rank=rank, count=count, host_memory=memory) for rank in range(count))
        self.config = _with_devices(ranks, self.share.part(numbers))
        self._processes: list[subprocess.Popen[bytes]] = []
        self.end = weakref.finalize(self, _end, self._processes)  # at exit, too
        try:
            for share in others:
                own = _with_devices(ranks.replace(node_rank=share.rank), share.part(numbers))
                self._processes.append(_start(own, share))
        except BaseException:
            self.end()
            raise

    def check(self) -> None:
        """Raises ConfigError if one of them has ended."""
        for rank, process in enumerate(self._processes, 1):
            if (status := process.poll()) is not None:
                raise ConfigError(f"the process of rank {rank} ended with status {status} before it was ready")

    def kill(self, rank: int) -> None:
        """Kills a rank that hangs."""
        self._processes[rank - 1].kill()


def _with_devices(config: EngineConfig, numbers: Sequence[int]) -> EngineConfig:
    return config.replace(device_ids=",".join(map(str, numbers)))


def _start(config: EngineConfig, share: MachineShare) -> subprocess.Popen[bytes]:
    """Starts a fresh interpreter that runs a worker."""
    command = [sys.executable, "-m", "llmjax.engine.ranks.worker_main"]
    with signals_held_back():
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=python_environment())
    assert process.stdin is not None
    with suppress(OSError), process.stdin:  # it ended at once; ``check`` says so
        process.stdin.write(msgspec.msgpack.encode(Start(config, share, logging.getLogger().getEffectiveLevel())))
    return process


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_SECONDS)
        process.kill()
        process.wait()
