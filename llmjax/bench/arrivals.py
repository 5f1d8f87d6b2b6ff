"""When the requests of a benchmark are sent."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(count: int, *, rate: float, burstiness: float, rng: np.random.Generator) -> np.ndarray:
    """Times of ``count`` requests, with gamma-distributed gaps as in vLLM's benchmark.

    Args:
        rate: requests a second on average; infinity: all at once.
        burstiness: shape of the gamma distribution; 1: a Poisson process, below: more bursty, above: more even.

    Returns:
        f64 [count] seconds from the start, rising, the last at exactly ``count / rate``.
    """
    if math.isinf(rate) or count == 0:
        return np.zeros(count)
    gaps = rng.gamma(shape=burstiness, scale=1 / (rate * burstiness), size=count)
    times = np.cumsum(gaps)
    # Scaled so that every seed offers the same load.
    return times * (count / rate / times[-1]) if times[-1] > 0 else np.linspace(0, count / rate, count)
