"""Attention with linear biases (Press et al. 2021, arXiv:2108.12409)."""

from __future__ import annotations


def alibi_slopes(heads: int, *, largest: float = 8) -> tuple[float, ...]:
    """The slope of each head: how much each token of distance subtracts from a logit.

    If the number of heads n is a power of two: ``2 ** (-largest k / n)`` for k = 1 … n. Otherwise: the slopes of the
    largest power of two below n, then every second slope of the next power of two (the authors' code, which section 3
    of the paper refers to).
    """
    whole = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-largest * k / whole) for k in range(1, whole + 1)]
    slopes += [2.0 ** (-largest * k / (2 * whole)) for k in range(1, 2 * whole, 2)]
    return tuple(slopes[:heads])
