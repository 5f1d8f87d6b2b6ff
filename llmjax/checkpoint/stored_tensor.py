"""The interface of stored tensors in all formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
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


@dataclass(frozen=True, eq=False)
class Derived(ABC):
    """A tensor that is made of stored ones when it is read (a `StoredTensor`), as plain numbers unless its class says
    otherwise.

    Attributes:
        name: name in the model.
        sources: the stored tensors.
    """

    name: str
    sources: tuple[StoredTensor, ...]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """See `StoredTensor.shape`."""

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in self.sources)

    @property
    def type_name(self) -> str:
        return " and ".join(dict.fromkeys(source.type_name for source in self.sources))

    def row_source(self) -> RowSource | RowStack | None:
        """None: it is read as plain numbers."""
        return None

    @abstractmethod
    def read(self, dtype: np.dtype) -> np.ndarray:
        """The values; see `StoredTensor.read`."""
