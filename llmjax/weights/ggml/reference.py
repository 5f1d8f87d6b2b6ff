"""ggml's reference quantizers: weights in the blocks of a GGUF file, bit for bit as ggml writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from llmjax.errors import CheckpointError
from llmjax.kernels.cpu.cores import usable_cores
from llmjax.weights.ggml import quantizers
from llmjax.weights.ggml.types import GGML_TYPES, BlockType

TILE = 1 << 16  # weights quantized at a time: they and the arrays of a search stay in the L2 cache

SCALES = frozenset({"d", "m", "dmin"})  # fields of blocks that are f16
LARGEST = 2.0**29  # beyond what any block with f16 scales holds; far beyond it, searches overflow to zero blocks

Fill = Callable[[np.ndarray, np.ndarray], None]
"""Fills structured blocks [n] from f32 [n, elems]."""


@dataclass(frozen=True)
class Scheme:
    """A ggml type that can be written.

    Attributes:
        block: the type.
        fill: its quantizer.
    """

    block: BlockType
    fill: Fill


_FILLS: Mapping[str, Fill] = {
    "q4_0": quantizers.quantize_q4_0,
    "q4_1": quantizers.quantize_q4_1,
    "q5_0": quantizers.quantize_q5_0,
    "q5_1": quantizers.quantize_q5_1,
    "q8_0": quantizers.quantize_q8_0,
    "q2_k": quantizers.quantize_q2_k,
    "q3_k": quantizers.quantize_q3_k,
    "q4_k": quantizers.quantize_q4_k,
    "q5_k": quantizers.quantize_q5_k,
    "q6_k": quantizers.quantize_q6_k,
    "iq4_nl": quantizers.quantize_iq4_nl,
    "iq4_xs": quantizers.quantize_iq4_xs,
    "tq1_0": quantizers.quantize_tq1_0,
    "tq2_0": quantizers.quantize_tq2_0,
    "mxfp4": quantizers.quantize_mxfp4,
}
_BY_NAME = {block.name.lower(): block for block in GGML_TYPES.values()}

SCHEMES: Mapping[str, Scheme] = MappingProxyType({name: Scheme(_BY_NAME[name], fill) for name, fill in _FILLS.items()})
"""Schemes by ggml's name in lower case."""


def quantize(weights: np.ndarray, scheme: str, *, threads: int | None = None) -> np.ndarray:
    """Weights in the blocks of a GGUF file.

    Args:
        weights: float [rows, columns]; columns a multiple of the scheme's block (32, 256 for K-quants, iq4_xs and the
            ternary types). Other types than f32 are converted first, tile by tile.
        scheme: a key of SCHEMES.
        threads: how many; None: one for each core that this process may use.

    Returns:
        uint8 [rows, bytes of a row], which `types.dequantize` reads.

    Raises:
        CheckpointError: columns do not fill blocks; a weight is infinite or not a number, or beyond what the scheme's
            scales can hold.
    """
    block = SCHEMES[scheme].block
    rows, columns = weights.shape
    if columns % block.elems:
        raise CheckpointError(f"rows of {columns} weights cannot be quantized to {scheme} in blocks of {block.elems}")
    source = np.ascontiguousarray(weights).reshape(-1, block.elems)
    blocks = np.empty(len(source), block.layout)
    step = TILE // block.elems

    def fill(start: int) -> None:
        tile = source[start : start + step].astype(np.float32, copy=False)
        peak = np.abs(tile).max(initial=0)
        if not np.isfinite(peak):
            raise CheckpointError(f"weights that are infinite or not a number cannot be quantized to {scheme}")
        target = blocks[start : start + step]
        fill_blocks(tile, scheme, target)
        scales = [target[field] for field in SCALES.intersection(target.dtype.names or ())]
        if scales and (peak > LARGEST or not all(np.isfinite(scale).all() for scale in scales)):
            raise CheckpointError(f"weights up to {peak:.3g} are too large for {scheme}: a scale would exceed float16")

    starts = range(0, len(source), step)
    workers = min(len(starts), threads or usable_cores())
    if workers > 1:
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(fill, starts):
                pass
    else:
        for start in starts:
            fill(start)
    return blocks.view(np.uint8).reshape(rows, -1)


def fill_blocks(weights: np.ndarray, scheme: str, blocks: np.ndarray) -> None:
    """One tile, unchecked: what ggml writes, even where scales overflow.

    Args:
        weights: finite f32 [n, elems].
        scheme: a key of SCHEMES.
        blocks: structured array [n] of the scheme's layout, to be filled.
    """
    with np.errstate(all="ignore"):
        SCHEMES[scheme].fill(weights, blocks)
