"""Rows of a quantised GGUF tensor, taken apart when they are packed for a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmjax.checkpoint.gguf.file import GGUFTensor
from llmjax.errors import CheckpointError
from llmjax.kernels.qtensor import RowFormat
from llmjax.weights.rows import QuantizedRows


@dataclass(frozen=True, eq=False)
class GGUFRows:
    """A `RowSource`.

    Attributes:
        tensor: a matrix of a quantised type.
        format: of each row.
        row_order: int [rows]; row i is stored row ``row_order[i]``. None: the stored order.
    """

    tensor: GGUFTensor
    format: RowFormat
    row_order: np.ndarray | None = None
    columns: None = None
    row_step: int = 1

    @property
    def size_out(self) -> int:
        return self.tensor.shape[0]

    def quantized_rows(self, start: int, stop: int) -> QuantizedRows:
        """Rows `start` to `stop`.

        Raises:
            CheckpointError: a scale or minimum is infinite or not a number.
        """
        tensor = self.tensor
        raw = tensor.take_rows(slice(start, stop) if self.row_order is None else self.row_order[start:stop])
        rows = tensor.block.quantized_rows(raw, self.format, big_endian=tensor.big_endian)
        if not rows.finite:
            raise CheckpointError(f"{tensor.path}: tensor {tensor.name!r} has scales that are infinite or not a number")
        return rows


def row_source(tensor: GGUFTensor, row_order: np.ndarray | None = None) -> GGUFRows | None:
    """The rows of a matrix, or None if its type is plain numbers or cannot be read, or it is no matrix."""
    form = tensor.block.row_format(tensor.shape[-1]) if len(tensor.shape) == 2 else None
    return None if form is None else GGUFRows(tensor, form, row_order)
