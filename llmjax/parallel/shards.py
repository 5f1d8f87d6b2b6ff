"""Cuts one device's part out of stored matrices, before they are packed.

A part is a matrix with some of the rows or columns of the whole one, or a stack of some of its matrices. So packing and
kernels treat it like any other matrix. Where a share has NOTHING, weights are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from llmjax.kernels.row_format import RowFormat
from llmjax.models.layers.shares import NOTHING, Share
from llmjax.parallel.division import Cut
from llmjax.weights.packing import RowSource, RowStack
from llmjax.weights.rows import CODE_DTYPES, NUMBER_DTYPES, QuantizedRows

Entries = npt.NDArray[np.int64]  # entries of one device
LEAST_GROUP = 16  # columns of the smallest group that `RowFormat` allows


def cut_array(values: np.ndarray, cut: Cut, device: int) -> np.ndarray:
    """A device's part of an array."""
    entries = cut.entries[device]
    if (entries != NOTHING).all() and (np.diff(entries) == 1).all():  # a view
        index = (slice(None),) * cut.axis + (slice(int(entries[0]), int(entries[-1]) + 1),)
        return values[index]
    part = values.take(np.maximum(entries, 0), axis=cut.axis)
    np.moveaxis(part, cut.axis, 0)[entries == NOTHING] = 0
    return part


def cut_source(source: RowSource | RowStack, cut: Cut, device: int) -> RowSource | RowStack | None:
    """A device's part of a quantized matrix, or of each matrix of a stack.

    Returns:
        The part; None: the cut goes through a group of columns that cannot be divided with its scale.
    """
    stacked = isinstance(source, RowStack)
    form, entries = source.format, cut.entries[device]
    if isinstance(source, RowStack) and cut.axis == 0:
        return _some_matrices(source, entries)
    if cut.axis == int(stacked):  # rows
        if isinstance(source, RowStack):
            whole = source
            return RowStack(whole.count, lambda index: SomeRows(whole.matrix(index), entries))
        return SomeRows(source, entries)
    own = None if source.columns is not None else format_of_columns(form, cut.entries)
    if own is None:
        return None
    if isinstance(source, RowStack):
        whole, kept = source, own
        return RowStack(whole.count, lambda index: SomeColumns(whole.matrix(index), entries, kept))
    return SomeColumns(source, entries, own)


def _some_matrices(stack: RowStack, entries: Entries) -> RowStack:
    """Some matrices of a stack, and matrices of zeros; all have an order of columns if any in the stack has one."""
    ordered = stack.columns is not None
    rows, in_order = np.arange(stack.size_out), np.arange(stack.format.size_in)

    def matrix(index: int) -> RowSource:
        at = int(entries[index])
        if at == NOTHING:
            return SomeRows(stack.first, np.full_like(rows, NOTHING), in_order if ordered else None)
        one = stack.matrix(at)
        return SomeRows(one, rows, in_order) if ordered and one.columns is None else one

    return RowStack(len(entries), matrix)


@dataclass(frozen=True, eq=False)
class SomeRows:
    """Rows of a matrix as a `RowSource`.

    Attributes:
        order: see `RowSource.columns`; None: the order of the whole matrix.
    """

    whole: RowSource
    entries: Entries
    order: np.ndarray | None = None

    row_step = 1

    @property
    def format(self) -> RowFormat:
        """The format of each row."""
        return self.whole.format

    @property
    def columns(self) -> np.ndarray | None:
        """See `RowSource`."""
        return self.whole.columns if self.order is None else self.order

    @property
    def size_out(self) -> int:
        """The number of rows."""
        return len(self.entries)

    def quantized_rows(self, start: int, stop: int) -> QuantizedRows:
        """See `RowSource`."""
        entries, step, form = self.entries[start:stop], self.whole.row_step, self.format
        found = _zeros(form, len(entries))
        ends = np.flatnonzero((np.diff(entries) != 1) | (entries[:-1] == NOTHING)) + 1
        for first, last in pairwise([0, *ends.tolist(), len(entries)]):
            at = int(entries[first])
            if at == NOTHING:
                continue
            begin = at // step * step
            rows = self.whole.quantized_rows(begin, at + last - first)
            for name, values in _arrays(found).items():
                values[first:last] = getattr(rows, name)[at - begin :]
        return found


@dataclass(frozen=True, eq=False)
class SomeColumns:
    """Columns of a matrix as a `RowSource`.

    Attributes:
        format: the result of `format_of_columns`.
    """

    whole: RowSource
    entries: Entries
    format: RowFormat

    columns = None

    @property
    def size_out(self) -> int:
        """The number of rows."""
        return self.whole.size_out

    @property
    def row_step(self) -> int:
        """The step of the whole matrix."""
        return self.whole.row_step

    def quantized_rows(self, start: int, stop: int) -> QuantizedRows:
        """See `RowSource`."""
        rows, form = self.whole.quantized_rows(start, stop), self.format
        found = {"codes": _taken(rows.codes, self.entries, fill=zero_code(form) or 0)}
        for name in form.fields:
            places = self._of_supers if name.startswith("super") else self._of_groups
            found[name] = _taken(getattr(rows, name), places, fill=0)
        return QuantizedRows(format=form, **found)

    @cached_property
    def _of_groups(self) -> Entries:
        return _places(self.entries, self.whole.format.group_size, self.format.group_size)

    @cached_property
    def _of_supers(self) -> Entries:
        return _places(self.entries, self.whole.format.super_size, self.format.super_size)


def format_of_columns(form: RowFormat, entries: Share) -> RowFormat | None:
    """The format of rows of some columns: groups are smaller if the cut goes through larger ones.

    Args:
        form: format of whole rows.
        entries: the columns of each device.

    Returns:
        The format; None: there is none, because a group would have fewer than 16 columns.
    """
    mixed = zero_code(form) is not None
    group = _largest(entries, form.group_size, unit=LEAST_GROUP, mixed=mixed)
    if group is None:
        return None
    own = replace(form, size_in=entries.shape[1], group_size=group)
    if not form.super_size:
        return own
    above = _largest(entries, form.super_size, unit=group, mixed=True)  # a group of zeros has a scale of 0
    return None if above is None else replace(own, super_size=above)


def zero_code(form: RowFormat) -> int | None:
    """The code that stands for 0 with any scale; None: there is none, or each group has its own."""
    if form.minimum or isinstance(form.zero, str):
        return None
    if not form.codes.levels:
        return form.zero
    return form.codes.levels.index(form.zero) if form.zero in form.codes.levels else None


def _largest(entries: Share, size: int, *, unit: int, mixed: bool) -> int | None:
    """The largest group size for which each group has columns of only one group of ``size``.

    Args:
        unit: the group size must be a multiple of this.
        mixed: whether a group may have NOTHING among its columns.
    """
    for own in range(size, 0, -unit):
        if size % own or own % unit:
            continue
        if all(
            _fits(row[at : at + own] // size, row[at : at + own] == NOTHING, mixed)
            for row in entries
            for at in range(0, entries.shape[1], own)
        ):
            return own
    return None


def _fits(groups: Entries, empty: npt.NDArray[np.bool_], mixed: bool) -> bool:
    there = groups[~empty]
    return len(there) == 0 or bool((there == there[0]).all() and (mixed or not empty.any()))


def _places(entries: Entries, size: int, own: int) -> Entries:
    """The group of ``size`` columns that each group of ``own`` columns comes from; NOTHING: it is padding."""
    padded = np.pad(entries, (0, -len(entries) % own), constant_values=NOTHING).reshape(-1, own)
    return np.where(padded == NOTHING, NOTHING, padded // size).max(axis=1)


def _taken(values: np.ndarray, places: Entries, *, fill: int) -> np.ndarray:
    found = values[:, np.maximum(places, 0)]
    if (places == NOTHING).any():
        # Zeros as bits: some types of scales have no number 0.
        found[:, places == NOTHING] = np.full((), fill, found.dtype) if fill else np.zeros((), found.dtype)
    return found


def _zeros(form: RowFormat, rows: int) -> QuantizedRows:
    """Quantized rows of zeros."""
    codes = np.full((rows, form.size_in), zero_code(form) or 0, CODE_DTYPES[form.codes.kind])
    numbers = {name: np.zeros((rows, run.count), NUMBER_DTYPES[run.number]) for name, run in form.fields.items()}
    return QuantizedRows(format=form, codes=codes, **numbers)


def _arrays(rows: QuantizedRows) -> dict[str, np.ndarray]:
    return {"codes": rows.codes, **{name: getattr(rows, name) for name in rows.format.fields}}
