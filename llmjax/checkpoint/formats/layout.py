"""The layout of a stored matrix's rows, and how they fit the records of a `QTensor`.

A record holds groups of one size, a multiple of 16, in order. Files have more freedom: columns may belong to groups in
any order, and groups may have any size. So a layout is a tuple of pieces that each fit a record: usually one, whose
columns are sorted by group where they have to be; else one for each group, which is enough to dequantize them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llmjax.kernels.row_format import Codes, RowFormat
from llmjax.weights.rows import FLOATS, QuantizedRows

UNIT = 16  # group sizes of records are multiples of it


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Rows with their columns and groups as they are stored, in the dtypes that `QuantizedRows` asks for.

    Attributes:
        codes: [n, in].
        scales: [n, groups].
        zeros: [n, groups], or None.
        super_scales: [n, 1], or None.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None
    super_scales: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Piece:
    """Columns of a matrix whose rows fit records.

    Attributes:
        format: format of a record.
        columns: intp [in of the format], group after group; None: all columns, in order.
        groups: groups that the columns belong to.
    """

    format: RowFormat
    columns: np.ndarray | None
    groups: slice

    def rows(self, stored: StoredRows) -> QuantizedRows:
        """The piece of some rows."""
        return QuantizedRows(
            format=self.format,
            codes=stored.codes if self.columns is None else stored.codes.take(self.columns, axis=1),
            scales=stored.scales[:, self.groups],
            zeros=None if stored.zeros is None else stored.zeros[:, self.groups],
            super_scales=stored.super_scales,
        )

    def dequantize(self, stored: StoredRows, out: np.ndarray) -> None:
        """Fills the piece's columns of f32 [n, in]."""
        if self.columns is None:
            self.rows(stored).dequantize(out)
            return
        part = np.empty((len(out), len(self.columns)), np.float32)
        self.rows(stored).dequantize(part)
        if len(self.columns) < out.shape[1]:
            out[:, self.columns] = part
        else:  # the same, several times faster
            part.take(self._places, axis=1, out=out, mode="clip")

    @cached_property
    def _places(self) -> np.ndarray:
        """The index in `columns` of each logical column, intp [in]."""
        assert self.columns is not None
        return np.argsort(self.columns)


@dataclass(frozen=True, eq=False)
class Layout:
    """The description of a matrix's rows before they are read.

    Attributes:
        size_in: number of columns.
        codes: kind of the codes.
        group_size: consecutive columns that share a scale; the last group may be shorter.
        scale, zero: see `RowFormat`.
        group_of: intp [in], the group of each column, in no order; None: groups follow each other.
        super_scale: number type of a scale above those of each row; empty: none.
    """

    size_in: int
    codes: Codes
    group_size: int
    scale: str
    zero: int | str = 0
    group_of: np.ndarray | None = None
    super_scale: str = ""

    @cached_property
    def problem(self) -> str:
        """Why a record cannot hold whole rows; empty: it can."""
        sizes = self._sizes
        if len(sizes) == 1:
            return ""
        if (sizes[:-1] != sizes[0]).any() or not 0 < sizes[-1] <= sizes[0]:
            return f"its groups of columns have sizes from {sizes.min()} to {sizes.max()}"
        return f"its groups of {sizes[0]} columns are not a multiple of {UNIT}" if sizes[0] % UNIT else ""

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Pieces that together have all columns; a single one if there is no `problem`."""
        order = None if self.group_of is None else np.argsort(self.group_of, kind="stable")
        if not self.problem:
            return (Piece(self._format(self.size_in, int(self._sizes[0])), order, slice(len(self._sizes))),)
        ends = self._sizes.cumsum()
        columns = np.split(np.arange(self.size_in) if order is None else order, ends[:-1])
        return tuple(
            Piece(self._format(len(own), len(own)), own, slice(group, group + 1))
            for group, own in enumerate(columns)
            if len(own)
        )

    @property
    def _sizes(self) -> np.ndarray:
        """The number of columns of each group."""
        if self.group_of is not None:
            return np.bincount(self.group_of)
        full, rest = divmod(self.size_in, self.group_size)
        return np.array([self.group_size] * full + [rest] * bool(rest))

    def _format(self, size_in: int, group_size: int) -> RowFormat:
        group_size = -(-group_size // UNIT) * UNIT
        whole = -(-size_in // group_size) * group_size
        return RowFormat(
            size_in=size_in,
            codes=self.codes,
            group_size=group_size,
            scale=self.scale,
            zero=self.zero,
            super_size=whole if self.super_scale else 0,
            super_scale=self.super_scale or "f16",
        )


@dataclass(frozen=True)
class Unsigned:
    """Unsigned codes and zero points of 1 to 8 bits; records store 7 and 8 bits as two's complement.

    Attributes:
        bits: bits of a code in the file.
    """

    bits: int

    @property
    def offset(self) -> int:
        """The number that records subtract from codes and zero points."""
        return 0 if self.bits < 7 else self.middle

    @property
    def middle(self) -> int:
        """The zero point of symmetric weights."""
        return 1 << self.bits - 1

    @property
    def codes(self) -> Codes:
        return Codes(8, "int") if self.offset else Codes(self.bits)

    @property
    def zero_type(self) -> str:
        return "i8" if self.offset else "u8"

    def keep(self, values: np.ndarray) -> np.ndarray:
        """Converts codes or zero points, uint8 of any shape, to the form in records."""
        return (values - np.uint8(self.offset)).view(np.int8) if self.offset else values


def scale_type(dtype: np.dtype) -> str:
    """The number type in which records keep scales of a stored type."""
    return next((name for name, kept in FLOATS.items() if kept == dtype), "f32")
