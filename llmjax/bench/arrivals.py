"""When the requests of a benchmark are sent."""

from __future__ import annotations

import math

import numpy as np

RAMPS = ("linear", "exponential")


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
    times = times_at(np.full(count, rate), burstiness=burstiness, rng=rng)
    # Scaled so that every seed offers the same load.
    return times * (count / rate / times[-1]) if times[-1] > 0 else np.linspace(0, count / rate, count)


def ramp_rates(count: int, *, strategy: str, start: float, end: float) -> np.ndarray:
    """The rate at which each request comes while the rate rises.

    Args:
        strategy: "linear" or "exponential", over the requests.
        start, end: requests a second at the first request and at the last, above 0.

    Returns:
        f64 [count] requests a second.
    """
    made = np.geomspace if strategy == "exponential" else np.linspace
    return made(start, end, count)


def times_at(rates: np.ndarray, *, burstiness: float, rng: np.random.Generator) -> np.ndarray:
    """Times of requests that come at changing rates.

    Args:
        rates: f64 [count] requests a second.
        burstiness: as in ``arrival_times``.

    Returns:
        f64 [count] seconds from the start, rising.
    """
    return np.asarray(np.cumsum(rng.gamma(shape=burstiness, scale=1 / (rates * burstiness))))
