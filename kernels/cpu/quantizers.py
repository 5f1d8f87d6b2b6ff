"""ggml's reference quantizers in C++: the bits of ``llmjax.weights.ggml.reference``, sooner and on all cores."""

from __future__ import annotations

import ctypes
import enum
import functools
from typing import Any

import numpy as np
from numpy.ctypeslib import ndpointer

from llmjax.kernels.cpu.library import LIBRARY, library

TYPES = frozenset({2, 3, 6, 7, 8, 12, 13, 14})  # as GGUF files number them


class Quantized(enum.Enum):
    """How it went, as the library says it."""

    DONE = 1
    NOT_FINITE = -1  # a weight is infinite or not a number
    TOO_LARGE = -2  # a scale would exceed float16


def quantizes(type_id: int) -> bool:
    """Whether there are kernels here, and for that type."""
    return type_id in TYPES and library() is not None


def quantize_blocks(weights: np.ndarray, blocks: np.ndarray, *, type_id: int) -> Quantized:
    """Fills blocks; other threads go on meanwhile.

    Args:
        weights: f32 [n, weights of a block].
        blocks: u8 [n * bytes of a block].
        type_id: GGUF's number of a type that there are kernels for.
    """
    done = _function()(type_id, np.ascontiguousarray(weights), len(weights), blocks)
    assert done, f"type {type_id} is not quantized in C++"
    return Quantized(done)


@functools.cache
def _function() -> Any:
    quantize = ctypes.CDLL(str(LIBRARY)).llmjax_quantize
    given, blocks = (ndpointer(kind, flags="C_CONTIGUOUS") for kind in (np.float32, np.uint8))
    quantize.argtypes = [ctypes.c_int, given, ctypes.c_size_t, blocks]
    return quantize
