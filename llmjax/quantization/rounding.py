"""Weights rounded to nearest: the quantizer that needs no calibration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from llmjax.checkpoint.stored_tensor import StoredTensor
from llmjax.errors import CheckpointError
from llmjax.kernels.cpu.cores import usable_cores
from llmjax.quantization.difference import Difference
from llmjax.quantization.in_situ import FloatRows
from llmjax.weights.rows import QuantizedRows
from llmjax.weights.uniform import Float8Scheme, IntegerScheme

BLOCK = 1 << 20  # weights that a thread quantizes at a time


@dataclass(frozen=True, eq=False)
class Result:
    """What became of a tensor.

    Attributes:
        name: Hugging Face name.
        value: its rows, or plain numbers of its shape that replace it (a norm that a scale was folded into).
        difference: from what it was, of quantized weights.
    """

    name: str
    value: QuantizedRows | np.ndarray
    difference: Difference | None = None


def round_to_nearest(
    tensors: Mapping[str, StoredTensor], layers: Mapping[str, IntegerScheme | Float8Scheme]
) -> Iterator[Result]:
    """Quantizes matrices one after the other, blocks of rows in threads.

    Args:
        tensors: by Hugging Face name.
        layers: the scheme of each that is to be quantized.

    Raises:
        CheckpointError: a weight cannot be quantized so; names the tensor.
    """
    with ThreadPoolExecutor(usable_cores()) as pool:
        for name, scheme in layers.items():
            try:
                yield _rounded(name, tensors[name], scheme, pool)
            except CheckpointError as error:
                raise CheckpointError(f"tensor {name!r}: {error}") from None


def _rounded(name: str, tensor: StoredTensor, scheme: IntegerScheme | Float8Scheme, pool: ThreadPoolExecutor) -> Result:
    source = FloatRows(tensor)
    rows, columns = tensor.shape
    step = source.row_step * max(1, BLOCK // (source.row_step * columns))
    if isinstance(scheme, Float8Scheme) and scheme.per_tensor:
        step = rows

    def block(start: int) -> tuple[QuantizedRows, Difference]:
        weights = source.read(start, min(start + step, rows)).astype(np.float32, copy=False)
        quantized = scheme.quantize(weights)
        found = np.empty(weights.shape, np.float32)
        quantized.dequantize(found)
        return quantized, Difference.between(found, weights)

    blocks, differences = zip(*pool.map(block, range(0, rows, step)), strict=True)
    return Result(name, joined(blocks), sum(differences, Difference()))


def joined(blocks: tuple[QuantizedRows, ...]) -> QuantizedRows:
    """Blocks of rows of one format as one."""
    first = blocks[0]
    if len(blocks) == 1:
        return first
    zeros = (
        None if first.zeros is None else np.concatenate([block.zeros for block in blocks if block.zeros is not None])
    )
    return QuantizedRows(
        first.format,
        np.concatenate([block.codes for block in blocks]),
        np.concatenate([block.scales for block in blocks]),
        zeros=zeros,
    )
