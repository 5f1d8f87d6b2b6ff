"""The searches for scales in ggml's reference quantizers of K-quants, bit for bit.

Everything here works on f32 [m, n]: n sub-blocks side by side, each a column of m numbers. ggml adds the numbers of a
sub-block one after the other; sums over the first axis keep that order, so that every bit is the same as in
``make_qkx2_quants``, ``make_qx_quants`` and ``make_q3_quants`` of ggml-quants.c (built without fused multiply-add, as
ggml builds that file). Searches keep only the best multiplier: codes are computed afterwards, and only where the scale
of a sub-block was rounded to 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmjax.kernels.cpu import searches as cpu

ALL_ZERO = np.float32(1e-15)
"""ggml's GROUP_MAX_EPS: sub-blocks whose numbers are all smaller count as zero."""

PLAIN = np.float32(4e6)
"""Below this, `nearest` equals rint, which is faster."""

_MAGIC = np.float32(12582912)  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits of the sum


def columns(weights: np.ndarray, size: int) -> np.ndarray:
    """A copy [size, n] with the numbers of each sub-block in a column."""
    return np.array(weights.reshape(-1, size).T, order="C")


def nearest(values: np.ndarray) -> np.ndarray:
    """ggml's ``nearest_int``: int32, halves to even, with its results for numbers above 2^22 and for nan (0)."""
    bits = (values + _MAGIC).view(np.int32)
    bits &= 0x7FFFFF
    bits -= 0x400000
    return bits


def ordered_sum(values: np.ndarray) -> np.ndarray:
    """Sums f32 [m, n] to f32 [n], adding the m numbers one after the other."""
    if values.shape[1] == 1:  # a single column would be summed pairwise
        total: np.ndarray = np.add.accumulate(values, axis=0)[-1]
        return total
    return np.add.reduce(values, axis=0)


def largest(values: np.ndarray) -> np.ndarray:
    """The first number of largest magnitude in each column, with its sign: f32 [m, n] to f32 [n]; 0 instead of -0."""
    high, low = values.max(axis=0), values.min(axis=0)
    peak = np.where(high >= -low, high, low)
    (ties,) = np.nonzero(high == -low)
    if len(ties):
        tied = values[:, ties]
        peak[ties] = np.take_along_axis(tied, np.abs(tied).argmax(axis=0)[None], axis=0)[0]
    return peak + 0


def requantize(values: np.ndarray, scales: np.ndarray, *, bounds: tuple[int, int]) -> np.ndarray:
    """int32 codes of f32 [m, n] with scales f32 [n] (inf and 0 where the block cannot be represented)."""
    codes = nearest(values / scales)
    np.clip(codes, *bounds, out=codes)
    return codes


@dataclass(frozen=True)
class AffineSearch:
    """Settings of `fit_affine`.

    Attributes:
        top: the largest code.
        first: the number that the first step adds to `top` for its multiplier.
        steps: multipliers tried beyond the first.
        absolute: whether the error is a sum of magnitudes instead of squares.
    """

    top: int
    first: float
    steps: int
    absolute: bool = False


@dataclass(frozen=True)
class AffineFit:
    """A fit of numbers by scale * code + minimum.

    Attributes:
        top: the largest code.
        scale: f32 [n].
        minimum: f32 [n], at most 0.
        origin: f32 [n], the minimum from which the best codes were found.
        multiplier: f32 [n]; the best codes are ``nearest((number - origin) * multiplier)``.
    """

    top: int
    scale: np.ndarray
    minimum: np.ndarray
    origin: np.ndarray
    multiplier: np.ndarray

    def codes(self, x: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """The best codes, int32 [m, k], for the columns [k] of f32 [m, n]."""
        above = x[:, columns] - self.origin[columns]
        return nearest(above * self.multiplier[columns]).clip(0, self.top)


def fit_affine(x: np.ndarray, weights: np.ndarray, search: AffineSearch) -> AffineFit:
    """Finds scale and minimum of least weighted error (``make_qkx2_quants``), in C++ where the kernels are built.

    Args:
        x: f32 [m, n].
        weights: f32 [m, n], weights of the errors.
        search: the multipliers to try.
    """
    top, first, steps, absolute = search.top, search.first, search.steps, search.absolute
    found = cpu.fit_affine(x, weights, top=top, first=first, steps=steps, absolute=absolute)
    return fit_affine_by_numpy(x, weights, search) if found is None else AffineFit(search.top, *found)


def fit_affine_by_numpy(x: np.ndarray, weights: np.ndarray, search: AffineSearch) -> AffineFit:
    """`fit_affine` without kernels."""
    low, high = x.min(axis=0), x.max(axis=0)
    least = np.minimum(low, 0)
    flat = high == least
    top = np.float32(search.top)
    codes, work, weighted = np.empty_like(x), np.empty_like(x), np.empty_like(x)

    def find_codes(origin: np.ndarray, multiplier: np.ndarray) -> None:
        np.subtract(x, origin, out=codes)
        np.multiply(codes, multiplier, out=codes)
        size = np.abs(multiplier)
        if (np.abs(low - origin) * size < PLAIN).all() and (np.abs(high - origin) * size < PLAIN).all():
            np.clip(np.rint(codes, out=codes), 0, top, out=codes)
        else:
            codes[...] = nearest(codes).clip(0, search.top)

    def error(scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
        np.multiply(codes, scale, out=work)
        np.add(work, minimum, out=work)
        np.subtract(work, x, out=work)
        if search.absolute:
            np.abs(work, out=work)
        else:
            np.multiply(work, work, out=work)
        np.multiply(work, weights, out=work)
        return ordered_sum(work)

    multiplier = np.where(flat, 0, top / (high - least))
    scale, minimum, origin = 1 / multiplier, least, least
    find_codes(origin, multiplier)
    best_error = error(scale, minimum)
    total = ordered_sum(weights)
    total_x = ordered_sum(np.multiply(weights, x, out=work))
    for step in range(search.steps + 1):
        reach = np.float32(search.first) + np.float32(0.1) * np.float32(step) + top
        tried = np.where(flat, 0, reach / (high - minimum))
        find_codes(minimum, tried)
        np.multiply(weights, codes, out=weighted)
        sum_l = ordered_sum(weighted)
        sum_l2 = ordered_sum(np.multiply(weighted, codes, out=work))
        sum_xl = ordered_sum(np.multiply(weighted, x, out=work))
        determinant = total * sum_l2 - sum_l * sum_l
        new_scale = (total * sum_xl - total_x * sum_l) / determinant
        new_minimum = (sum_l2 * total_x - sum_l * sum_xl) / determinant
        above_zero = new_minimum > 0
        new_scale = np.where(above_zero, sum_xl / sum_l2, new_scale)
        new_minimum[above_zero] = 0
        new_error = error(new_scale, new_minimum)
        better = (determinant > 0) & (new_error < best_error)
        best_error = np.where(better, new_error, best_error)
        multiplier = np.where(better, tried, multiplier)
        origin = np.where(better, minimum, origin)
        scale = np.where(better, new_scale, scale)
        minimum = np.where(better, new_minimum, minimum)
    return AffineFit(search.top, np.where(flat, 0, scale), np.where(flat, least, minimum), origin, multiplier)


@dataclass(frozen=True)
class SymmetricFit:
    """A fit of numbers by scale * code, with codes around 0.

    Attributes:
        scale: f32 [n], 0 for sub-blocks that count as zero.
        codes: int32 [m, n] in ggml's form: shifted to start at 0, and 0 in sub-blocks that count as zero.
    """

    scale: np.ndarray
    codes: np.ndarray


def fit_symmetric(x: np.ndarray, middle: int) -> SymmetricFit:
    """Finds the scale of least error weighted by squares (``make_qx_quants``, type 1), in C++ where kernels are built.

    Codes are from -middle to middle - 1.

    Args:
        x: f32 [m, n].
        middle: 32 for six bits.
    """
    peak = largest(x)
    zero = np.abs(peak) < ALL_ZERO
    peak[zero] = 1
    found = cpu.fit_symmetric(x, peak, middle=middle)
    scale, multiplier = symmetric_scale_by_numpy(x, peak, middle) if found is None else found
    final = nearest(x * multiplier).clip(-middle, middle - 1) + middle
    final[:, zero] = 0
    scale[zero] = 0
    return SymmetricFit(scale, final)


def symmetric_scale_by_numpy(x: np.ndarray, peak: np.ndarray, middle: int) -> tuple[np.ndarray, np.ndarray]:
    """The scale of `fit_symmetric` and the multiplier of its codes, f32 [n], without kernels.

    Args:
        peak: f32 [n], the numbers of largest magnitude; 1 for sub-blocks that count as zero.
    """
    half = np.float32(middle)
    weights = x * x
    weighted = weights * x
    codes, work = np.empty_like(x), np.empty_like(x)
    scale, best, multiplier = np.zeros_like(peak), np.zeros_like(peak), -half / peak
    for step in (0, *range(-9, 0), *range(1, 10)):
        tried = -(half + np.float32(0.1) * np.float32(step)) / peak
        np.multiply(x, tried, out=codes)
        np.clip(np.rint(codes, out=codes), -half, half - 1, out=codes)  # |codes| < middle + 1: no need for `nearest`
        sum_xl = ordered_sum(np.multiply(weighted, codes, out=work))
        np.multiply(weights, codes, out=work)
        sum_l2 = ordered_sum(np.multiply(work, codes, out=work))
        # The first codes are kept whatever their error is, even if sums overflow to nan.
        better = (sum_l2 > 0) & (sum_xl * sum_xl > best * sum_l2) if step else sum_l2 != 0
        found = sum_xl / sum_l2
        scale = np.where(better, found, scale)
        best = np.where(better, found * sum_xl, best)
        multiplier = np.where(better, tried, multiplier)
    return scale, multiplier


def fit_symmetric_by_code(x: np.ndarray, middle: int) -> SymmetricFit:
    """Like `fit_symmetric`, but improves one code after the other (``make_q3_quants``).

    Args:
        x: f32 [m, n].
        middle: 4 for three bits.
    """
    peak = largest(x)
    zero = np.abs(peak) < ALL_ZERO
    peak[zero] = 1
    codes = nearest(x * (np.float32(-middle) / peak)).clip(-middle, middle - 1).astype(np.float32)
    weights = x * x
    weighted = weights * x
    sum_xl = ordered_sum(weighted * codes)
    sum_l2 = ordered_sum(weights * codes * codes)
    for _ in range(5):
        changed = False
        for number, weight, product, code in zip(x, weights, weighted, codes, strict=True):
            rest_xl = sum_xl - product * code
            rest_l2 = sum_l2 - weight * code * code
            tried = nearest(number * rest_l2 / rest_xl).clip(-middle, middle - 1).astype(np.float32)
            new_xl = rest_xl + product * tried
            new_l2 = rest_l2 + weight * tried * tried
            better = (rest_xl > 0) & (tried != code) & (new_l2 > 0)
            better &= new_xl * new_xl * sum_l2 > sum_xl * sum_xl * new_l2
            if better.any():
                changed = True
                np.copyto(code, tried, where=better)
                np.copyto(sum_xl, new_xl, where=better)
                np.copyto(sum_l2, new_l2, where=better)
        if not changed:
            break
    scale = np.where((sum_l2 > 0) & ~zero, sum_xl / sum_l2, np.float32(0))
    final = codes.astype(np.int32) + middle
    final[:, zero] = 0
    return SymmetricFit(scale, final)
