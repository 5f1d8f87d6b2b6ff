"""How far what a model says of the next token is from what another says."""

from __future__ import annotations

import numpy as np
from scipy.special import log_softmax


def divergence(expected: np.ndarray, found: np.ndarray) -> float:
    """The mean Kullback-Leibler divergence of the second from the first, in nats.

    Args:
        expected, found: [n, V] logits or log-probabilities.
    """
    p, q = log_softmax(expected.astype(np.float64), axis=-1), log_softmax(found.astype(np.float64), axis=-1)
    return float((np.exp(p) * (p - q)).sum(-1).mean())
