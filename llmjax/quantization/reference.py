"""ggml's reference quantisers for the types with blocks of 32: q4_0 q4_1 q5_0 q5_1 q8_0.

Bit for bit what ``quantize_row_*_ref`` of ggml-quants.c writes: codes are formed with the f32 reciprocal of the scale
before the scale is rounded to f16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from llmjax.checkpoint.ggml import GGML_TYPES, TILE
from llmjax.errors import CheckpointError, ConfigError

BLOCK = 32
LAYOUTS = MappingProxyType({block.name.lower(): block.layout for block in GGML_TYPES.values()})


def quantize(weights: np.ndarray, scheme: str) -> np.ndarray:
    """Weights in the blocks of a GGUF file.

    Args:
        weights: float [rows, columns]; columns a multiple of 32. Other types than f32 are converted first.
        scheme: a key of SCHEMES.

    Returns:
        uint8 [rows, bytes of a row], which `ggml.dequantize` reads.

    Raises:
        ConfigError: the scheme is unknown.
        CheckpointError: columns do not fill blocks, or a weight is infinite or not a number.
    """
    if scheme not in SCHEMES:
        raise ConfigError(f"quantization scheme {scheme!r} is unknown; known are {', '.join(SCHEMES)}")
    rows, columns = weights.shape
    if columns % BLOCK:
        raise CheckpointError(f"rows of {columns} weights cannot be quantised to {scheme} in blocks of {BLOCK}")
    layout = np.dtype(LAYOUTS[scheme])
    blocks = np.empty(rows * columns // BLOCK, layout)
    flat = np.ascontiguousarray(weights).reshape(-1, BLOCK)
    step = TILE // BLOCK
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):  # scales beyond f16 become inf, as in ggml
        for start in range(0, len(flat), step):
            tile = flat[start : start + step].astype(np.float32, copy=False)
            if not np.isfinite(tile).all():
                raise CheckpointError(f"weights that are infinite or not a number cannot be quantised to {scheme}")
            SCHEMES[scheme](tile, blocks[start : start + step])
    return blocks.view(np.uint8).reshape(rows, -1)


def _reciprocal(scale: np.ndarray) -> np.ndarray:
    return np.where(scale == 0, np.float32(0), 1 / scale)


def _truncate(values: np.ndarray, top: int) -> np.ndarray:
    """uint8 codes of non-negative numbers, at most `top`."""
    codes: np.ndarray = np.trunc(values).astype(np.uint8)
    return codes.clip(0, top)


def _symmetric(weights: np.ndarray, blocks: np.ndarray, middle: int) -> np.ndarray:
    """Codes around `middle`: the number of largest magnitude becomes code 0, whatever its sign."""
    largest = np.take_along_axis(weights, np.abs(weights).argmax(axis=1, keepdims=True), axis=1)
    scale = largest / np.float32(-middle)
    blocks["d"] = scale[:, 0]
    return _truncate(weights * _reciprocal(scale) + np.float32(middle + 0.5), 2 * middle - 1)


def _from_minimum(weights: np.ndarray, blocks: np.ndarray, top: int) -> np.ndarray:
    """Codes from 0 for the minimum to `top` for the maximum."""
    least = weights.min(axis=1, keepdims=True)
    scale = (weights.max(axis=1, keepdims=True) - least) / np.float32(top)
    blocks["d"], blocks["m"] = scale[:, 0], least[:, 0]
    return _truncate((weights - least) * _reciprocal(scale) + np.float32(0.5), top)


def _store_nibbles(codes: np.ndarray, blocks: np.ndarray) -> None:
    blocks["qs"] = codes[:, :16] & 15 | codes[:, 16:] << 4


def _store_five_bits(codes: np.ndarray, blocks: np.ndarray) -> None:
    _store_nibbles(codes, blocks)
    blocks["qh"] = np.packbits(codes >> 4, axis=1, bitorder="little")


def _q4_0(weights: np.ndarray, blocks: np.ndarray) -> None:
    _store_nibbles(_symmetric(weights, blocks, 8), blocks)


def _q4_1(weights: np.ndarray, blocks: np.ndarray) -> None:
    _store_nibbles(_from_minimum(weights, blocks, 15), blocks)


def _q5_0(weights: np.ndarray, blocks: np.ndarray) -> None:
    _store_five_bits(_symmetric(weights, blocks, 16), blocks)


def _q5_1(weights: np.ndarray, blocks: np.ndarray) -> None:
    _store_five_bits(_from_minimum(weights, blocks, 31), blocks)


def _q8_0(weights: np.ndarray, blocks: np.ndarray) -> None:
    scale = np.abs(weights).max(axis=1, keepdims=True) / np.float32(127)
    blocks["d"] = scale[:, 0]
    exact = weights * _reciprocal(scale)
    size = np.abs(exact)
    whole = np.floor(size)
    whole += np.floor(2 * (size - whole))  # halves go away from zero, as C's roundf has it
    blocks["qs"] = np.copysign(whole, exact)


SCHEMES: Mapping[str, Callable[[np.ndarray, np.ndarray], None]] = MappingProxyType(
    {"q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0}
)
"""What fills structured blocks [n] from f32 [n, 32]."""
