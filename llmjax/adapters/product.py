"""Products of two factors as stored tensors: what renames and cuts tensors of a checkpoint does so with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from llmjax.adapters.adapter import Floats
from llmjax.checkpoint.experts import ExpertStack
from llmjax.checkpoint.gguf.model import ConvertedTensor
from llmjax.checkpoint.rows import ColumnsOf, RowsOf
from llmjax.checkpoint.stored_tensor import StoredTensor
from llmjax.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, eq=False)
class Factors:
    """What an adapter's files have of a matrix [out, in], or of a stack of matrices [experts, out, in].

    Attributes:
        a: f32 [rank, in] or [experts, rank, in].
        b: f32 [out, rank] or [experts, out, rank], with the scale.
        magnitude: f32 [out], lengths of the rows of the matrix with the adapter (DoRA).
        bias: f32 [out].
    """

    a: Floats
    b: Floats
    magnitude: Floats | None = None
    bias: Floats | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix or stack."""
        return (*self.b.shape[:-1], self.a.shape[-1])

    def of_rows(self, rows: slice | np.ndarray) -> Factors:
        """Some rows of the matrix."""
        magnitude, bias = (None if vector is None else vector[rows] for vector in (self.magnitude, self.bias))
        return Factors(a=self.a, b=self.b[rows], magnitude=magnitude, bias=bias)

    def of_columns(self, columns: slice | np.ndarray) -> Factors:
        """Some columns of the matrix."""
        return replace(self, a=self.a[:, columns])

    def one(self, expert: int) -> Factors:
        """A matrix of the stack."""
        return Factors(a=self.a[expert], b=self.b[expert])


@dataclass(frozen=True, kw_only=True, eq=False)
class Product:
    """The product ``b a`` as a tensor of a file (a `StoredStack`), which is never computed as a whole.

    Attributes:
        name: the name of the matrix in files.
        shape: [out, in] or [experts, out, in].
        factors: the factors of the matrix; those of a stack of one matrix where the shape is that of a matrix.
        path: the adapter, for messages.
    """

    name: str
    shape: tuple[int, ...]
    factors: Factors
    path: Path

    @classmethod
    def of(cls, name: str, factors: Factors, path: Path) -> Product:
        """The product of factors."""
        return cls(name=name, shape=factors.shape, factors=factors, path=path)

    @property
    def nbytes(self) -> int:
        return self.factors.a.nbytes + self.factors.b.nbytes

    @property
    def type_name(self) -> str:
        return "LoRA"

    @property
    def flat(self) -> Factors:
        """The factors of a matrix."""
        is_stack = self.factors.a.ndim > 2 and len(self.shape) == 2
        return self.factors.one(0) if is_stack else self.factors

    def row_source(self) -> None:
        """Plain numbers have none."""

    def read(self, dtype: np.dtype) -> np.ndarray:
        """The product."""
        return np.matmul(self.factors.b, self.factors.a).reshape(self.shape).astype(dtype)

    def matrix(self, index: int, rows: slice, name: str) -> Product:
        """See `StoredStack`."""
        return Product.of(name, self.factors.one(index).of_rows(rows), self.path)

    def row_slice(self, start: int, stop: int) -> Product:
        """Rows of the matrix, or matrices of the stack, as `GGUFTensor` has it."""
        if len(self.shape) == 2:
            return Product.of(self.name, self.flat.of_rows(slice(start, stop)), self.path)
        some = replace(self.factors, a=self.factors.a[start:stop], b=self.factors.b[start:stop])
        return Product.of(self.name, some, self.path)


def factors_of(tensor: StoredTensor) -> Factors | None:
    """The factors of a tensor that has been made of products by renaming and by choosing rows and columns.

    Returns:
        The factors; None: it is not made of products.

    Raises:
        CheckpointError: something else has been done to products.
    """
    match tensor:
        case Product():
            return tensor.flat
        case RowsOf(sources=(source,), rows=rows):
            return _changed(source, lambda whole: whole.of_rows(rows))
        case ColumnsOf(sources=(source,), columns=columns):
            return _changed(source, lambda whole: whole.of_columns(columns))
        case ConvertedTensor():
            return _changed(cast(StoredTensor, tensor.source), lambda whole: _converted(whole, tensor))
        case ExpertStack(sources=sources):
            each = [factors_of(source) for source in sources]
            some = [one for one in each if one is not None]
            if not some:
                return None
            if len(some) < len(each) or len({one.a.shape for one in some}) > 1:
                raise CheckpointError(f"adapter of {tensor.name}: experts have adapters of different ranks, or none")
            return Factors(a=np.stack([one.a for one in some]), b=np.stack([one.b for one in some]))
    if any(factors_of(source) is not None for source in getattr(tensor, "sources", ())):
        raise CheckpointError(f"adapter of {tensor.name}: the model does more than multiply with it, merge the adapter")
    return None


def _changed(source: StoredTensor, change: Callable[[Factors], Factors]) -> Factors | None:
    whole = factors_of(source)
    return None if whole is None else change(whole)


def _converted(whole: Factors, tensor: ConvertedTensor) -> Factors:
    """The original's factors from the stored ones."""
    change = tensor.change
    if change.values is not None:
        raise CheckpointError(f"adapter of {tensor.name}: the converter has changed the values of its matrix")
    if change.rows is not None:
        whole = whole.of_rows(change.rows)
    return whole if change.columns is None else whole.of_columns(change.columns)
