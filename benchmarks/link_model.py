"""What many devices would bring, by a model of link and compute: in a decode step each device reads its part of the
weights, and all of them wait for two sums of the hidden states in each layer."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median

import numpy as np

from llmjax.engine.clients.wire import Channel
from llmjax.engine.device.batch import Bucket
from llmjax.engine.device.commands import RunStep
from llmjax.engine.ranks.wire import ToWorker

READ_BYTES = 256 << 20  # more than caches hold
TELL_MICROSECONDS = 50  # that telling a follower of a step takes, at most
TELLS = 500


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model.

    Attributes:
        parameters: in all its matrices.
        bits: bits of a stored weight, scales included.
    """

    name: str
    layers: int
    parameters: float
    bits: float = 4.5  # q4_0, Q4_K, GPTQ with groups of 32

    @property
    def bytes(self) -> float:
        return self.parameters * self.bits / 8


SIZES = (Size(name="8B", layers=32, parameters=8.0e9), Size(name="70B", layers=80, parameters=70.6e9))


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """Devices that are all alike.

    Attributes:
        bytes_per_second: what one of them reads in a second.
        sum_seconds: seconds that a sum over all of them takes.
    """

    bytes_per_second: float
    sum_seconds: float

    def tokens_per_second(self, size: Size, devices: int) -> float:
        """Tokens a second of one stream."""
        summing = num_sums(size.layers) * self.sum_seconds if devices > 1 else 0.0
        return 1 / (size.bytes / (devices * self.bytes_per_second) + summing)

    def words(self, devices: int) -> list[str]:
        """Lines of text about what this many devices would bring."""
        lines = [
            f"with {devices} devices that read {self.bytes_per_second / 1e9:.1f} GB/s each, and sums of "
            f"{self.sum_seconds * 1e6:.0f} µs, one stream would have"
        ]
        for size in SIZES:
            one, several = (self.tokens_per_second(size, count) for count in (1, devices))
            lines.append(
                f"  {size.name} ({size.bytes / 1e9:.1f} GB): {several:.1f} tokens/s, {several / one:.1f} × one device's"
            )
        return lines


def num_sums(layers: int) -> int:
    """Sums in a step: after each layer's mixer and feed-forward sublayer, the embedding and the sampler."""
    return 2 * layers + 2


def seconds_of_sum(steps: Sequence[float], layers: int) -> float:
    """What a sum takes where devices share the cores, so that a step's other work takes as long as on one device.

    Args:
        steps: seconds of a step on one device, and on several.
    """
    one, several = steps
    return max(several - one, 0.0) / num_sums(layers)


def read_bytes_per_second(threads: int) -> float:
    """What plain loops over memory read, one a thread; the fastest of five times."""
    parts = [np.ones(READ_BYTES // threads // 8, np.int64) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        rates = []
        for _ in range(5):
            started = time.perf_counter()
            list(pool.map(np.sum, parts))
            rates.append(time.perf_counter() - started)
    return sum(part.nbytes for part in parts) / min(rates)


def tell_seconds(rows: int) -> float:
    """Time until a follower has read a decode step of ``rows`` rows that a leader sends it, in another process and over
    a network connection of this machine; the median."""
    step = RunStep(Bucket(tokens=rows, rows=rows, decode=True), np.zeros(16 * rows, np.int32))
    processes = multiprocessing.get_context("spawn")
    here, there = processes.Pipe(duplex=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        follower = processes.Process(target=_follow, args=(server.getsockname(), there), daemon=True)
        follower.start()
        near, _ = server.accept()
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    leader, told = Channel(near, ToWorker), []
    for _ in range(TELLS):
        told.append(time.perf_counter())
        leader.send(step)
        near.recv(1)
    near.close()
    came = here.recv()
    follower.join()
    return median(b - a for a, b in zip(told, came, strict=True))


def _follow(address: tuple[str, int], times: Connection) -> None:
    """Notes when each step has come, by the clock that all processes share, and asks for the next."""
    with socket.create_connection(address) as far:
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        came = []
        for _ in Channel(far, ToWorker).receive():
            came.append(time.perf_counter())
            far.sendall(b"\0")
    times.send(came)
