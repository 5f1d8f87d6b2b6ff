"""Mamba (Gu and Dao 2023, arXiv:2312.00752): a state space of each channel whose steps depend on the tokens, as a
recurrent mixer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from llmjax.models.layers.mixer import Projections
from llmjax.models.layers.norm import RMS
from llmjax.models.layers.shares import Share, channel_groups, inner_share, joined, unknown_axis
from llmjax.models.layers.state import Recurrent


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """Channels with a state each, written with (B) and read with (C) vectors that all channels share."""

    inner: int  # channels
    state_dim: int  # entries of a channel's state, of B and of C
    rank: int  # of the matrix that makes steps
    width: int  # of the causal convolution: tokens, its own included
    activation: str  # behind the convolution, a key of ACTIVATIONS
    norm: RMS | None  # of what steps are made of, B and C, each its own; None: there is none
    conv_bias: bool = True
    bias: bool = False  # of the first and the last product

    name: ClassVar[str] = "mamba"
    rope: ClassVar[None] = None
    projections: ClassVar[Projections] = (("in_proj",), ("x_proj",), ("dt_proj",), ("out_proj",))

    @property
    def state(self) -> Recurrent:
        """What a layer keeps: the states, and the convolution's last inputs."""
        return Recurrent(recent=(self.width - 1, self.inner), memory=(1, self.state_dim, self.inner))

    @property
    def sizes(self) -> dict[str, int]:
        """What people ask about it, by what they call it."""
        return {"recurrent channels": self.inner}

    @property
    def divisible(self) -> int:
        """Groups of channels, of which each device needs one."""
        return channel_groups(self.inner)

    def share(self, axis: str, size: int, devices: int) -> Share:
        """See ``Mixer.share``."""
        channels = inner_share(self.inner, devices)
        if axis == "channels":
            return channels
        if axis == "parts":  # of one size
            count = size // self.inner
            return joined([channels] * count, [self.inner] * count)
        raise unknown_axis(axis)

    def local(self, devices: int) -> Mamba:
        """The mixer of each of so many devices."""
        return replace(self, inner=inner_share(self.inner, devices).shape[1])
