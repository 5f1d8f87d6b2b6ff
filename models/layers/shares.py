"""Which heads and which units of a model each of N devices gets: arithmetic alone.

A share is an integer array [devices, each], row d being what device d has, by its place in the whole; NOTHING where it
has less than others. So every device has arrays of one shape, and what stands for NOTHING is zeros, which add nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

NOTHING = -1
Share = npt.NDArray[np.int64]

UNITS = (256, 128, 64, 32, 16)  # columns that stay together, where it costs little: groups of quantized ones may share
UNIT_WASTE = 1 / 8  # of a device's columns that may be zeros for the sake of a larger unit


def even_share(size: int, devices: int, *, unit: int = 1) -> Share:
    """Consecutive entries for each device, as many for all.

    Args:
        size: entries.
        unit: consecutive entries that no two devices share.
    """
    each = _each(size, devices, unit)
    share = np.arange(devices * each, dtype=np.int64).reshape(devices, each)
    return np.where(share < size, share, NOTHING)


def spread_share(size: int, devices: int) -> Share:
    """Consecutive entries for each device, as many as for another or one more; programs find them by ``own_range``."""
    starts = np.arange(devices + 1) * size // devices
    share = starts[:-1, None] + np.arange(-(-size // devices))
    return np.where(share < starts[1:, None], share, NOTHING)


def inner_share(size: int, devices: int) -> Share:
    """`even_share` of inner columns, by the largest of UNITS that wastes little, so that groups of them stay whole."""
    least = -(-size // devices)
    fitting = [unit for unit in UNITS if _each(size, devices, unit) <= least * (1 + UNIT_WASTE)]
    return even_share(size, devices, unit=fitting[0] if fitting else UNITS[-1])


def _each(size: int, devices: int, unit: int) -> int:
    units = -(-size // unit)
    return -(-units // devices) * unit


@dataclass(frozen=True)
class HeadShares:
    """Query heads with the keys and values that they read.

    The queries of each key/value head are cut into pieces of ``queries`` (the last one may be shorter), and every
    device gets as many pieces as any other, the last ones NOTHING. On a device the query heads of a piece follow each
    other, and its key/value head is a head of its own: one whose pieces go to several devices is on all of these.

    Attributes:
        kv_heads: of the model.
        group: query heads that share a key/value head.
        devices: that share them.
    """

    kv_heads: int
    group: int
    devices: int

    @cached_property
    def queries(self) -> int:
        """Query heads in a piece: so that rows of q, k, v and columns of o are fewest on a device."""
        return min(range(self.group, 0, -1), key=lambda size: 2 * self._pieces(size) * (size + 1))

    @cached_property
    def pieces(self) -> int:
        """Of each device: its key/value heads."""
        return self._pieces(self.queries)

    def _pieces(self, size: int) -> int:
        return -(-(self.kv_heads * -(-self.group // size)) // self.devices)

    @property
    def heads(self) -> int:
        """Query heads of each device."""
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
        found = piece // of_head * self.group + within
        found = np.where((piece == NOTHING) | (within >= self.group), NOTHING, found)
        return found.reshape(self.devices, -1)


def of_entries(share: Share, size: int) -> Share:
    """A share of units as one of the entries that each unit has ``size`` of."""
    entries = share[..., None] * size + np.arange(size)
    return np.where(share[..., None] == NOTHING, NOTHING, entries).reshape(len(share), -1)


def joined(shares: Sequence[Share], sizes: Sequence[int]) -> Share:
    """A share of parts that the whole has one after another, of ``sizes`` entries."""
    starts = np.cumsum([0, *sizes[:-1]])
    moved = [np.where(share == NOTHING, NOTHING, share + start) for share, start in zip(shares, starts, strict=True)]
    return np.concatenate(moved, axis=1)


def channel_groups(channels: int) -> int:
    """How many groups of channels there are that stay together."""
    return -(-channels // UNITS[-1])


def unknown_axis(axis: str) -> ValueError:
    """An error to raise about a logical axis that no parameter of a mixer has."""
    return ValueError(f"the mixer has no axis {axis!r}")
