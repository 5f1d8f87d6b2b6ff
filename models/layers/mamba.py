"""Mamba (Gu and Dao 2023, arXiv:2312.00752): a recurrent mixer with a selective state space for each channel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from llmjax.models.layers.mixer import Projections
from llmjax.models.layers.norm import RMS
from llmjax.models.layers.shares import Share, channel_groups, inner_share, joined, unknown_axis
from llmjax.models.layers.state import Recurrent


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """A state space for each channel; all channels share the vectors that write the states (B) and read them (C)."""

    inner: int  # channels
    state_dim: int  # size of a channel's state, of B and of C
    rank: int  # rank of the projection to time steps
    width: int  # tokens that the causal convolution sees, the current one included
    activation: str  # activation after the convolution, a key of ACTIVATIONS
    norm: RMS | None  # of the low-rank time steps, B and C, one each; None: they have no norm
    conv_bias: bool = True
    bias: bool = False  # of the first and the last projection

    name: ClassVar[str] = "mamba"
    rope: ClassVar[None] = None
    projections: ClassVar[Projections] = (("in_proj",), ("x_proj",), ("dt_proj",), ("out_proj",))

    @property
    def state(self) -> Recurrent:
        """What a layer keeps: the states, and the last inputs of the convolution."""
        return Recurrent(recent=(self.width - 1, self.inner), memory=(1, self.state_dim, self.inner))

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes to show to users, by their usual names."""
        return {"recurrent channels": self.inner}

    @property
    def divisible(self) -> int:
        """The number of groups of channels: each device needs at least one."""
        return channel_groups(self.inner)

    def share(self, axis: str, size: int, devices: int) -> Share:
        """See ``Mixer.share``."""
        channels = inner_share(self.inner, devices)
        if axis == "channels":
            return channels
        if axis == "parts":  # parts of equal size
            count = size // self.inner
            return joined([channels] * count, [self.inner] * count)
        raise unknown_axis(axis)

    def local(self, devices: int) -> Mamba:
        """The part of the mixer that each device has if ``devices`` of them divide it."""
        return replace(self, inner=inner_share(self.inner, devices).shape[1])
