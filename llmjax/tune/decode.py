"""Has the speed of one stream measured by a process for each number of threads, for XLA's pool has one size."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import dataclass

from llmjax.config import EngineConfig
from llmjax.errors import LLMJaxError, last_error
from llmjax.kernels.cpu.cores import physical_cores, usable_cores
from llmjax.system import python_path
from llmjax.tune.facts import Decode


class DecodeFailed(LLMJaxError):
    """A process that was to measure has failed."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a process measures.

    Attributes:
        kv_types: types of the KV cache by which attention is timed; (): it is not.
        tokens: tokens that attention sees.
    """

    config: EngineConfig
    kv_types: tuple[str, ...]
    tokens: int


def numbers_of_threads(config: EngineConfig, *, physical: int | None = None, usable: int | None = None) -> list[int]:
    """The numbers of threads to compare, the usual one first: one for each physical core; half of them, for memory may
    be what limits; and all that the cores can run at once.

    Args:
        physical, usable: cores, instead of this machine's.
    """
    if config.threads:
        return [config.threads]
    cores = physical_cores() if physical is None else physical
    all_threads = usable_cores() if usable is None else usable
    return list(dict.fromkeys([cores, max(1, cores // 2), all_threads]))


def measure(order: Order) -> Decode:
    """Measures with ``order.config.threads`` threads.

    Raises:
        DecodeFailed: the model does not start, or generates nothing.
    """
    done = subprocess.run(
        [sys.executable, "-m", "llmjax.tune.decode_main"],
        input=pickle.dumps(order),
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        check=False,
    )
    if done.returncode:
        reason, hint = last_error(done.stderr.decode(errors="replace"), done.returncode)
        raise DecodeFailed(f"with {order.config.threads} threads nothing was measured: {reason}", hint=hint)
    decode: Decode = pickle.loads(done.stdout)
    return decode
