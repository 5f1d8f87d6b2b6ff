"""Mamba 2 (Dao and Gu 2024, arXiv:2405.21060): a state space whose steps depend on the tokens, as a recurrent mixer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from llmjax.models.layers.mixer import Projections
from llmjax.models.layers.norm import RMS
from llmjax.models.layers.shares import HeadShares, Share, joined, of_entries, unknown_axis
from llmjax.models.layers.state import Recurrent


@dataclass(frozen=True)
class DividedGroups:
    """Groups of heads of which a device has some, or parts of some, where a norm goes over all of a group."""

    groups: int  # of all devices
    size: int  # entries of each
    numbers: tuple[int, ...]  # which of them each of all devices' groups is or is a part of, one device after another;
    # of what stands for none any, for its entries are zeros


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """A state of each head that forgets as fast as its token says; ``heads / groups`` heads share the vectors that are
    written with (B) and read with (C)."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int  # entries of B and of C
    width: int  # of the causal convolution over x, B and C: tokens, its own included
    activation: str  # behind the convolution, a key of ACTIVATIONS
    norm: RMS | None  # of what the heads of a group read; None: the gate alone
    norm_first: bool = False  # before the gate
    divided: DividedGroups | None = None  # of a device's state space with norms of groups that are on several devices;
    # None: its groups are whole
    steps: tuple[float, float] = (0.0, float("inf"))  # least and largest
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    scale: float = 1.0  # of what the mixer is given
    out_scale: float = 1.0  # of what it adds
    part_scales: tuple[float, float, float, float, float] = (1.0,) * 5  # of gate, x, B, C and steps

    name: ClassVar[str] = "mamba"
    rope: ClassVar[None] = None
    projections: ClassVar[Projections] = (("in_proj",), ("out_proj",))

    @property
    def inner(self) -> int:
        """Entries of x, and of what all heads read."""
        return self.heads * self.head_dim

    @property
    def parts(self) -> tuple[int, int, int, int, int]:
        """Rows of ``in_proj``: gate, x, B, C, steps."""
        shared = self.groups * self.state_dim
        return (self.inner, self.inner, shared, shared, self.heads)

    @property
    def channels(self) -> int:
        """What the convolution runs over: x, B and C."""
        return sum(self.parts[1:4])

    @property
    def state(self) -> Recurrent:
        """What a layer keeps: the state, and the convolution's last inputs."""
        return Recurrent(recent=(self.width - 1, self.channels), memory=(self.heads, self.state_dim, self.head_dim))

    @property
    def sizes(self) -> dict[str, int]:
        """What people ask about it, by what they call it."""
        return {"recurrent heads": self.heads}

    @property
    def divisible(self) -> int:
        """Heads, of which each device needs one."""
        return self.heads

    def share(self, axis: str, size: int, devices: int) -> Share:
        """See ``Mixer.share``."""
        shares = self._shares(devices)
        inner = of_entries(shares.share_of_queries, self.head_dim)
        shared = of_entries(shares.share_of_keys, self.state_dim)
        parts = (inner, inner, shared, shared, shares.share_of_queries)
        if axis == "heads":
            return of_entries(shares.share_of_queries, size // self.heads)
        if axis == "channels":
            return joined(parts[1:4], self.parts[1:4])
        if axis == "parts":
            return joined(parts, self.parts)
        raise unknown_axis(axis)

    def local(self, devices: int) -> Mamba2:
        """The mixer of each of so many devices."""
        shares, size = self._shares(devices), self.heads // self.groups
        divided = None
        if self.norm is not None and shares.queries != size:  # groups are not whole
            numbers = np.maximum(shares.share_of_keys, 0).ravel().tolist()
            divided = DividedGroups(self.groups, size * self.head_dim, tuple(numbers))
        return replace(self, heads=shares.heads, groups=shares.pieces, divided=divided)

    def _shares(self, devices: int) -> HeadShares:
        """Heads of a group share what is written and read with, as queries share keys."""
        return HeadShares(self.groups, self.heads // self.groups, devices)
