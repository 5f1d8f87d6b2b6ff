"""How many sequences and tokens a step may have where no setting says: by the memory of the device."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class StepSizes:
    """What one step holds at most."""

    max_num_seqs: int
    max_num_batched_tokens: int


LEAST = StepSizes(32, 512)  # on a CPU, and on devices of which nothing is known
# Each from these usable bytes on. vLLM's classes for servers: 8,192 tokens on cards of 70 GiB and more, 2,048 and 256
# sequences on others. Cards below 20 GiB have fewer slots: 256 of them take 2 bytes of 100 for sampling alone.
BY_MEMORY = ((60 * GIB, StepSizes(256, 8192)), (18 * GIB, StepSizes(256, 2048)), (0, StepSizes(64, 2048)))
MOST = BY_MEMORY[0][1]


def step_sizes(memory: int) -> StepSizes:
    """The sizes for an NVIDIA GPU, by the bytes of it that may be used."""
    return next(sizes for least, sizes in BY_MEMORY if memory >= least)
