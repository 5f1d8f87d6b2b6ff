"""Mamba 2 (Dao and Gu 2024, arXiv:2405.21060): a recurrent mixer with a selective state space for each head."""

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
    """One device's groups of heads, or parts of groups, in a model whose norm goes over whole groups."""

    groups: int  # groups of all devices
    size: int  # entries of a group
    numbers: tuple[int, ...]  # the model's group that each device's group is a part of, one device after another;
    # any number for padding, whose entries are zeros


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """A state for each head, which decays at a rate that the token sets; ``heads / groups`` heads share the vectors
    that write the state (B) and read it (C)."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int  # size of B and of C
    width: int  # tokens that the causal convolution over x, B and C sees, the current one included
    activation: str  # activation after the convolution, a key of ACTIVATIONS
    norm: RMS | None  # norm of what the heads of a group read; None: only the gate applies
    norm_first: bool = False  # whether the norm comes before the gate
    divided: DividedGroups | None = None  # in a device's part of a mixer whose groups several devices share;
    # None: its groups are whole
    steps: tuple[float, float] = (0.0, float("inf"))  # smallest and largest time step
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    scale: float = 1.0  # factor of the input
    out_scale: float = 1.0  # factor of the output
    part_scales: tuple[float, float, float, float, float] = (1.0,) * 5  # factors of gate, x, B, C and time steps

    name: ClassVar[str] = "mamba"
    rope: ClassVar[None] = None
    projections: ClassVar[Projections] = (("in_proj",), ("out_proj",))

    @property
    def inner(self) -> int:
        """Size of x, and of what all heads read."""
        return self.heads * self.head_dim

    @property
    def parts(self) -> tuple[int, int, int, int, int]:
        """Rows of ``in_proj``: gate, x, B, C, time steps."""
        shared = self.groups * self.state_dim
        return (self.inner, self.inner, shared, shared, self.heads)

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return sum(self.parts[1:4])

    @property
    def state(self) -> Recurrent:
        """What a layer keeps: the state, and the last inputs of the convolution."""
        return Recurrent(recent=(self.width - 1, self.channels), memory=(self.heads, self.state_dim, self.head_dim))

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes to show to users, by their usual names."""
        return {"recurrent heads": self.heads}

    @property
    def divisible(self) -> int:
        """The number of heads: each device needs at least one."""
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
        """The part of the mixer that each device has if ``devices`` of them divide it."""
        shares, size = self._shares(devices), self.heads // self.groups
        divided = None
        if self.norm is not None and shares.queries != size:  # groups are not whole
            numbers = np.maximum(shares.share_of_keys, 0).ravel().tolist()
            divided = DividedGroups(self.groups, size * self.head_dim, tuple(numbers))
        return replace(self, heads=shares.heads, groups=shares.pieces, divided=divided)

    def _shares(self, devices: int) -> HeadShares:
        """The shares of the heads: those of a group share B and C as query heads share a key."""
        return HeadShares(self.groups, self.heads // self.groups, devices)
