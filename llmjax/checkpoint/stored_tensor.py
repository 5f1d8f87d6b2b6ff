"""What every format's tensors have in common."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from llmjax.weights.packing import RowSource, RowStack


class StoredTensor(Protocol):
    """A tensor in a file; nothing of it is in memory before `read`."""

    @property
    def name(self) -> str:
        """Hugging Face name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As in torch: a linear layer is [out, in]."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""

    @property
    def type_name(self) -> str:
        """Type in the file: ``BF16``, ``Q4_K`` …"""

    def row_source(self) -> RowSource | RowStack | None:
        """Its codes and scales, where it is a quantized matrix, or a stack of them, that can stay one; None: `read` it.

        Raises:
            CheckpointError: as `read`.
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
        """Rows of a matrix of the stack [n, out, in], where they lie, as a tensor of their own.

        Args:
            rows: with start and stop.
            name: of that tensor.
        """
