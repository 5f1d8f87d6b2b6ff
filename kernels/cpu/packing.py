"""Blocks of GGUF files become the words of a `QTensor`, and matrices of bf16 panels, in C++: at the speed of memory and
on all cores, while NumPy holds the interpreter's lock for most of what that takes."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from numpy.ctypeslib import ndpointer

from llmjax.kernels.cpu.library import LIBRARY, library
from llmjax.kernels.panels import panels_shape
from llmjax.kernels.row_format import RowFormat

TYPES = frozenset({2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 39})  # as GGUF files number them
FIELDS = ("scales", "minima", "super_scales", "super_minima")


def packs(type_id: int) -> bool:
    """Whether there are kernels here, and for that type."""
    return type_id in TYPES and library() is not None


def pack_blocks(raw: np.ndarray, words: np.ndarray, *, type_id: int, block_bytes: int, form: RowFormat) -> bool:
    """Packs rows into tiles; other threads go on meanwhile.

    Args:
        raw: u8 [rows, bytes of a row], blocks as they are stored.
        words: u32 [tiles, words of a record, rows of a tile], which are filled; zeros after the last row.
        type_id: GGUF's number of a type that there are kernels for.
        block_bytes: bytes of a block.
        form: how each row is stored.

    Returns:
        Whether all scales are finite.
    """
    starts = np.array([form.fields[name].start if name in form.fields else 0 for name in FIELDS], np.uintp)
    sizes = (len(raw), raw.shape[1] // block_bytes, form.num_words)
    done = _function()(type_id, np.ascontiguousarray(raw), *sizes, starts, words.shape[-1], words)
    assert done, f"type {type_id} is not packed in C++"
    return bool(done == 1)


def fill_panels(weight: np.ndarray, panels: np.ndarray) -> None:
    """Brings a matrix into panels; other threads go on meanwhile.

    Args:
        weight: bf16 [out, in].
        panels: bf16 of ``llmjax.kernels.panels.panels_shape``, which is filled.
    """
    assert panels.dtype == weight.dtype and panels.shape == panels_shape(*weight.shape), panels.shape
    _panels_function()(np.ascontiguousarray(weight).view(np.uint16), *weight.shape, panels.view(np.uint32))


@functools.cache
def _panels_function() -> Any:
    fill = ctypes.CDLL(str(LIBRARY)).llmjax_fill_panels
    size = ctypes.c_size_t
    rows, panels = (ndpointer(kind, flags="C_CONTIGUOUS") for kind in (np.uint16, np.uint32))
    fill.argtypes, fill.restype = [rows, size, size, panels], None
    return fill


@functools.cache
def _function() -> Any:
    pack = ctypes.CDLL(str(LIBRARY)).llmjax_pack_blocks
    size = ctypes.c_size_t
    given, starts, words = (ndpointer(kind, flags="C_CONTIGUOUS") for kind in (np.uint8, np.uintp, np.uint32))
    pack.argtypes = [ctypes.c_int, given, size, size, size, starts, size, words]
    return pack
