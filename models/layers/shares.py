"""Computes which heads and columns of a model each of N devices gets.

A share is an integer array [devices, each]: row d lists the indices in the whole that device d has, padded with NOTHING
if it has fewer than others. So arrays have the same shape on all devices; entries for NOTHING are zeros, which add
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

NOTHING = -1
Share = npt.NDArray[np.int64]

UNITS = (256, 128, 64, 32, 16)  # columns that stay together, where that costs little: quantized ones may share scales
UNIT_WASTE = 1 / 8  # the part of a device's columns that may be zeros to allow a larger unit


def even_share(size: int, devices: int, *, unit: int = 1) -> Share:
    """Consecutive entries for each device, the same number for all.

    Args:
        size: number of entries.
        unit: number of consecutive entries that stay on one device.
    """
    each = _each(size, devices, unit)
    share = np.arange(devices * each, dtype=np.int64).reshape(devices, each)
    return np.where(share < size, share, NOTHING)


def spread_share(size: int, devices: int) -> Share:
    """Consecutive entries for each device, whose numbers differ by at most one; programs find them by ``own_range``."""
    starts = np.arange(devices + 1) * size // devices
    share = starts[:-1, None] + np.arange(-(-size // devices))
    return np.where(share < starts[1:, None], share, NOTHING)


def inner_share(size: int, devices: int) -> Share:
    """`even_share` of inner columns in the largest of UNITS that wastes little, so that quantized groups stay whole."""
    least = -(-size // devices)
    fitting = [unit for unit in UNITS if _each(size, devices, unit) <= least * (1 + UNIT_WASTE)]
    return even_share(size, devices, unit=fitting[0] if fitting else UNITS[-1])


def _each(size: int, devices: int, unit: int) -> int:
    units = -(-size // unit)
    return -(-units // devices) * unit


@dataclass(frozen=True)
class HeadShares:
    """Shares of query heads and of the key/value heads that they read.

    The query heads of each key/value head are cut into pieces of ``queries`` (the last one may be shorter), and every
    device gets the same number of pieces, of which the last may be NOTHING. On a device the query heads of a piece are
    consecutive, and each piece has a key/value head of its own: a head whose pieces go to several devices is on each.

    Attributes:
        kv_heads: number of key/value heads of the model.
        group: number of query heads that share a key/value head.
        devices: number of devices that share the heads.
    """

    kv_heads: int
    group: int
    devices: int

    @cached_property
    def queries(self) -> int:
        """Query heads in a piece, chosen for the fewest rows of q, k, v and columns of o on a device."""
        return min(range(self.group, 0, -1), key=lambda size: 2 * self._pieces(size) * (size + 1))

    @cached_property
    def pieces(self) -> int:
        """Pieces on each device, which is also its number of key/value heads."""
        return self._pieces(self.queries)

    def _pieces(self, size: int) -> int:
        return -(-(self.kv_heads * -(-self.group // size)) // self.devices)

    @property
    def heads(self) -> int:
        """The number of query heads of each device."""
        return self.pieces * self.queries

    @cached_property
    def share_of_keys(self) -> Share:
        """The key/value heads of each device, [devices, pieces]."""
        of_head = -(-self.group // self.queries)
        piece = even_share(self.kv_heads * of_head, self.devices)
        return np.where(piece == NOTHING, NOTHING, piece // of_head)

    @cached_property
    def share_of_queries(self) -> Share:
        """The query heads of each device, [devices, pieces * queries]."""
        of_head = -(-self.group // self.queries)
        piece = even_share(self.kv_heads * of_head, self.devices)[..., None]  # [devices, pieces, 1]
        within = piece % of_head * self.queries + np.arange(self.queries)
        heads = piece // of_head * self.group + within
        heads = np.where((piece == NOTHING) | (within >= self.group), NOTHING, heads)
        return heads.reshape(self.devices, -1)


def of_entries(share: Share, size: int) -> Share:
    """A share of units, converted to a share of their entries; a unit has ``size`` entries."""
    entries = share[..., None] * size + np.arange(size)
    return np.where(share[..., None] == NOTHING, NOTHING, entries).reshape(len(share), -1)


def joined(shares: Sequence[Share], sizes: Sequence[int]) -> Share:
    """One share of the concatenation of parts, of ``sizes`` entries, from the share of each part."""
    starts = np.cumsum([0, *sizes[:-1]])
    moved = [np.where(share == NOTHING, NOTHING, share + start) for share, start in zip(shares, starts, strict=True)]
    return np.concatenate(moved, axis=1)


def channel_groups(channels: int) -> int:
    """The number of groups of channels that stay together."""
    return -(-channels // UNITS[-1])


def unknown_axis(axis: str) -> ValueError:
    """An error to raise about a logical axis that no parameter of a mixer has."""
    return ValueError(f"the mixer has no axis {axis!r}")
