"""How ggml's reference quantizers look for scales, in C++ (`llmjax.weights.ggml.search`): the same bits, sooner."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from numpy.ctypeslib import ndpointer

from llmjax.kernels.cpu.library import LIBRARY, library

_Numbers = ndpointer(np.float32, flags="C_CONTIGUOUS")


def fit_affine(
    x: np.ndarray, weights: np.ndarray, *, top: int, first: float, steps: int, absolute: bool
) -> np.ndarray | None:
    """``make_qkx2_quants`` of ggml-quants.c, without the codes.

    Args:
        x: f32 [m, n]: n sub-blocks of m numbers, 32 at most.
        weights: f32 [m, n], what an error counts.
        top, first, steps, absolute: as `AffineSearch` has them.

    Returns:
        f32 [4, n]: scale, minimum, origin and multiplier, as `AffineFit` has them; None: the kernels are not built.
    """
    if library() is None:
        return None
    fit = np.empty((4, x.shape[1]), np.float32)
    arguments = (np.ascontiguousarray(x), np.ascontiguousarray(weights), *x.shape)
    _do("llmjax_fit_affine", *arguments, top, first, steps, absolute, fit)
    return fit


def fit_symmetric(x: np.ndarray, peak: np.ndarray, *, middle: int) -> np.ndarray | None:
    """``make_qx_quants`` of ggml-quants.c, type 1, without the codes.

    Args:
        x: f32 [m, n]: n sub-blocks of m numbers, 32 at most.
        peak: f32 [n], their numbers of largest magnitude, none of them 0.
        middle: codes go from -middle to middle - 1.

    Returns:
        f32 [2, n]: scales, and the multipliers of the best codes; None: the kernels are not built.
    """
    if library() is None:
        return None
    fit = np.empty((2, x.shape[1]), np.float32)
    arguments = (np.ascontiguousarray(x), np.ascontiguousarray(peak), *x.shape)
    _do("llmjax_fit_symmetric", *arguments, middle, fit)
    return fit


def _do(name: str, *arguments: Any) -> None:
    if not getattr(_functions(), name)(*arguments):
        raise ValueError(f"{name}: sub-blocks have too many numbers")


@functools.cache
def _functions() -> ctypes.CDLL:
    """The library, which says what these functions take; other threads go on while they run."""
    handle = ctypes.CDLL(str(LIBRARY))
    size, number, integer = ctypes.c_size_t, ctypes.c_float, ctypes.c_int
    blocks: list[Any] = [_Numbers, _Numbers, size, size]
    handle.llmjax_fit_affine.argtypes = [*blocks, number, number, integer, integer, _Numbers]
    handle.llmjax_fit_symmetric.argtypes = [*blocks, number, _Numbers]
    return handle
