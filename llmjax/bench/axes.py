"""What stands at the axes of a figure: the words and units of a benchmark's variables, and ticks that they can have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

LATENCIES = MappingProxyType(
    {
        "ttft": "time to first token",
        "tpot": "time per output token",
        "itl": "inter-token latency",
        "e2el": "end-to-end latency",
    }
)
UNITS = MappingProxyType(
    {
        "request_throughput": "requests/s",
        "request_goodput": "requests/s",
        "request_rate": "requests/s",
        "requests_per_second": "requests/s",
        "output_throughput": "tokens/s",
        "total_token_throughput": "tokens/s",
        "tokens_per_second": "tokens/s",
        "max_output_tokens_per_s": "tokens/s",
        "input_sequence_throughput": "sequences/s",
        "duration": "s",
        "elapsed_time": "s",
        "avg_latency": "s",
    }
)
SUFFIXES = MappingProxyType({"_ms": "ms", "_seconds": "s", "_bytes": "bytes"})


def axis_label(name: str) -> str:
    """A variable in words, with its unit: ``p99_e2el_ms`` as "p99 end-to-end latency (ms)"."""
    plain = name.replace("-", "_")
    unit = UNITS.get(plain)
    if unit is None:
        suffix = next((suffix for suffix in SUFFIXES if plain.endswith(suffix)), "")
        plain, unit = plain.removesuffix(suffix), SUFFIXES.get(suffix)
    words = " ".join(LATENCIES.get(word, word) for word in re.split("_+", plain) if word)
    return f"{words} ({unit})" if unit else words


def set_ticks(axis: Any, values: Iterable[float | str]) -> None:
    """Gives an axis of matplotlib's whole ticks where its values are whole, and plain numbers instead of powers.

    Args:
        axis: ``ax.xaxis`` or ``ax.yaxis``, whose scale is set.
        values: what is drawn along it; texts bring their own ticks.
    """
    from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

    numbers = [value for value in values if not isinstance(value, str)]
    if not numbers:
        return
    distinct = sorted(set(numbers))
    whole = all(float(number).is_integer() for number in distinct)
    if axis.get_scale() == "linear":
        if whole:
            axis.set_major_locator(MaxNLocator(integer=True))
        return
    if len(distinct) <= 10:  # 1, 2, 4, 8 and not 10 to the power of 0.25
        axis.set_ticks(distinct)
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(ScalarFormatter())
