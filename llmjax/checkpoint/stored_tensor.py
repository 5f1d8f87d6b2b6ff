"""The interface of stored tensors in all formats."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from llmjax.weights.packing import RowSource, RowStack


class StoredTensor(Protocol):
    """A tensor in a file; nothing of it is in memory before `read`."""

    @property
    def name(self) -> str:
        """The Hugging Face name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, in torch's order: a linear layer is [out, in]."""

    @property
    def nbytes(self) -> int:
        """The number of bytes in the file."""

    @property
    def type_name(self) -> str:
        """The type in the file: ``BF16``, ``Q4_K`` …"""

    def row_source(self) -> RowSource | RowStack | None:
        """Codes and scales of a quantized matrix or stack that can stay quantized; None: use `read`.

        Raises:
            CheckpointError: see `read`.
        """

    def read(self, dtype: np.dtype) -> np.ndarray:
        """The values [shape] as `dtype`: float32, float16 or bfloat16; maybe a read-only view of the file.

        Temporary memory is bounded by a few MB, whatever the tensor's size.

        Raises:
            CheckpointError: the stored type is not supported.
        """


class StoredStack(StoredTensor, Protocol):
    """A tensor in a file that may be a stack of matrices."""

    def matrix(self, index: int, rows: slice, name: str) -> StoredTensor:
        """Rows of a matrix of the stack [n, out, in] as a tensor, without a copy.

        Args:
            rows: a slice with start and stop.
            name: name of the new tensor.
        """
