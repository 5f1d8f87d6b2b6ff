"""Chooses settings by what is known; nothing is measured or read here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmjax.errors import ConfigError
from llmjax.tune.facts import Decode, KVType, Memory, Weights

SPARE = 0.1  # share of the free memory that is left for steps, programs and the rest of the process
KV_SHARE = 0.25  # share of the free memory for the KV cache, where that is enough; an engine's own choice too
MOST_KV = 4 * 2**30  # and no more than this, unless one request needs more
CLOSE = 0.05  # of two speeds that differ by less, the one with fewer threads is taken
UNIT = 2**20


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What fits into the memory.

    Attributes:
        kv_bytes: size of the KV cache.
    """

    weights: Weights
    kv: KVType
    kv_bytes: int


def fit(memory: Memory) -> Fit:
    """The form of weights and KV cache that loses least of those that fit. Weights count more: every token reads them.

    Raises:
        ConfigError: not even the smallest fits.
    """
    room = int(memory.free * (1 - SPARE))
    for weights in memory.weights:
        for kv in memory.kv_types:
            left = room - weights.num_bytes
            if kv.request_bytes <= left:
                usual = min(int(memory.free * KV_SHARE), MOST_KV)
                size = min(left, kv.most_bytes, max(kv.request_bytes, usual))
                return Fit(weights=weights, kv=kv, kv_bytes=max(UNIT, size // UNIT * UNIT))
    weights, kv = memory.weights[-1], memory.kv_types[-1]
    raise ConfigError(
        f"the model takes {weights.num_bytes / UNIT:,.0f} MiB for its weights and {kv.request_bytes / UNIT:,.0f} MiB "
        f"for a request of {memory.tokens:,} tokens, and {memory.free / UNIT:,.0f} MiB of memory are free",
        hint="take a smaller model, a smaller --max-model-len, or leave --quantization and --kv-cache-dtype open",
    )


def threads(decodes: Sequence[Decode]) -> Decode:
    """The fewest threads that are about as fast as any: the others are of use to the server beside them."""
    fastest = min(decode.step for decode in decodes)
    close = [decode for decode in decodes if decode.step <= fastest * (1 + CLOSE)]
    return min(close, key=lambda decode: decode.threads)
